import { EVENT_TYPES } from "@/live/touches";
import styles from "../Operations.module.css";
import { oneOf } from "../parts";
import type { EventType } from "../route";

interface EventTypesProps {
  chosen: readonly EventType[];
  onChange: (chosen: EventType[]) => void;
  /** A form is not sent without one. */
  required?: boolean;
}

/** Checkboxes, in the order of the API. */
export function EventTypes({ chosen, onChange, required = false }: EventTypesProps) {
  return (
    <div className={styles.choices}>
      {EVENT_TYPES.map((type) => (
        <label key={type} className={styles.check}>
          <input
            ref={required ? oneOf(chosen) : undefined}
            type="checkbox"
            checked={chosen.includes(type)}
            onChange={(event) =>
              onChange(EVENT_TYPES.filter((each) => (each === type ? event.target.checked : chosen.includes(each))))
            }
          />
          {type}
        </label>
      ))}
    </div>
  );
}
