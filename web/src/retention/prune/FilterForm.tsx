import { type FormEvent, useState } from "react";
import { Choice } from "@/components/choose/Choice";
import { RUN_STATUSES } from "@/runs/route";
import styles from "../Retention.module.css";
import { useChangeSearch, useRetentionSearch } from "../useRetention";
import { fieldsOfFilter, filterOf, HEALTHS } from "./pruneFilter";
import { type RunFilter, readRunFilter } from "./runFilter";

/** Which checkpoints are looked for. `ofRuns`: and in which runs. */
export function FilterForm({ ofRuns = false }: { ofRuns?: boolean }) {
  const { filter, allOfRun, runs } = useRetentionSearch();
  const change = useChangeSearch();
  const [fields, setFields] = useState(() => fieldsOfFilter(filter ?? {}));
  const [all, setAll] = useState(allOfRun ?? false);
  const [among, setAmong] = useState<RunFilter>(runs ?? {});
  const [wrong, setWrong] = useState("");

  function look(event: FormEvent) {
    event.preventDefault();
    const found = filterOf(fields);
    setWrong(typeof found === "string" ? found : "");
    if (typeof found !== "string")
      change({ filter: found, allOfRun: all || undefined, runs: ofRuns ? readRunFilter(among) : undefined });
  }

  function text(name: "fromStep" | "beforeStep" | "attempt" | "olderThan" | "labels", label: string, example: string) {
    return (
      <label className={styles.field}>
        <span>{label}</span>
        <input
          value={fields[name]}
          placeholder={example && `for example ${example}`}
          autoComplete="off"
          onChange={(event) => setFields({ ...fields, [name]: event.target.value })}
        />
      </label>
    );
  }

  function inRuns(name: "name" | "tag", label: string, example: string) {
    return (
      <label className={styles.field}>
        <span>{label}</span>
        <input
          value={among[name] ?? ""}
          placeholder={`for example ${example}`}
          autoComplete="off"
          onChange={(event) => setAmong({ ...among, [name]: event.target.value })}
        />
      </label>
    );
  }

  return (
    <form className="panel" onSubmit={look} aria-label="Which checkpoints">
      {ofRuns && (
        <div className={styles.fields}>
          {inRuns("name", "Runs whose name has", "llama")}
          {inRuns("tag", "Runs with the tag", "baseline")}
          <Choice
            label="Runs of status"
            className={styles.field}
            value={among.status}
            offered={RUN_STATUSES}
            onChange={(status) => setAmong({ ...among, status })}
          />
        </div>
      )}
      <div className={styles.fields}>
        {text("fromStep", "From step", "0")}
        {text("beforeStep", "Before step", "5000")}
        {text("attempt", "Attempt", "2")}
        {text("olderThan", "Committed longer ago than", "7d")}
        {text("labels", "With one of these labels", "debug, spike")}
      </div>
      <fieldset className={styles.checks}>
        <legend className="quiet">Health (none chosen: any)</legend>
        {HEALTHS.map((each) => (
          <label key={each}>
            <input
              type="checkbox"
              checked={fields.health.includes(each)}
              onChange={(event) =>
                setFields({
                  ...fields,
                  health: HEALTHS.filter((one) => (one === each ? event.target.checked : fields.health.includes(one))),
                })
              }
            />{" "}
            {each}
          </label>
        ))}
      </fieldset>
      <p>
        <label>
          <input type="checkbox" checked={all} onChange={(event) => setAll(event.target.checked)} /> Also the last
          points that {ofRuns ? "a" : "the"} run could be resumed from (only of a run without an active attempt)
        </label>
      </p>
      {wrong !== "" && <p role="alert">{wrong}</p>}
      <div className="row">
        <button type="submit">Show what matches</button>
        {filter !== undefined && (
          <button type="button" onClick={() => change({ filter: undefined, allOfRun: undefined, runs: undefined })}>
            Clear
          </button>
        )}
      </div>
    </form>
  );
}
