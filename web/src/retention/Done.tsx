import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { failureOf } from "@/api/problem";
import { Can } from "@/components/Can";
import { ErrorState } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { type Outcome, type TakenBack, takeBack } from "./actions";
import { plural } from "./Figure";
import styles from "./Retention.module.css";

const SHOWN_LEFT = 20;

/** What an action has done, and how it is taken back. */
export function Done({ outcome, onClose }: { outcome: Outcome; onClose: () => void }) {
  const [back, setBack] = useState<TakenBack | null>(null);
  const [busy, setBusy] = useState(false);
  const { trashed, left, purgeAt, freedBytes } = outcome;

  async function undo() {
    setBusy(true);
    setBack(await takeBack(trashed.map((each) => each.checkpoint_id)));
    setBusy(false);
  }

  return (
    <div className={styles.done} role="status">
      <p>
        <strong>
          {trashed.length === 0
            ? "Saved; nothing went to the trash."
            : `${plural(trashed.length, "checkpoint")} went to the trash.`}
        </strong>{" "}
        {purgeAt !== null && back === null && (
          <>
            They can be taken back until <Time at={purgeAt} />. Their purge then frees <Bytes count={freedBytes} />.
          </>
        )}
      </p>
      {left.length > 0 && (
        <>
          <p>{plural(left.length, "checkpoint")} stayed, although shown as going:</p>
          <ul>
            {left.slice(0, SHOWN_LEFT).map((each) => (
              <li key={each.checkpoint_id}>
                step {each.step} of attempt {each.attempt}: {each.reasons.map((reason) => reason.detail).join("; ")}
              </li>
            ))}
          </ul>
        </>
      )}
      {back !== null && <Back back={back} />}
      <div className="row">
        {trashed.length > 0 && back === null && (
          <Can scope="operate" reason={busy ? "They are being taken back." : undefined}>
            <button type="button" onClick={() => void undo()}>
              Undo: take {trashed.length === 1 ? "it" : `all ${trashed.length}`} back
            </button>
          </Can>
        )}
        <Link from="/retention" to="/retention" search={(old) => ({ ...old, view: "trash" as const })}>
          Open the trash
        </Link>
        <button type="button" onClick={onClose}>
          Close
        </button>
      </div>
    </div>
  );
}

/** How many are back, and why the others are not. */
export function Back({ back }: { back: TakenBack }) {
  const { taken, failures } = back;
  const first = failures[0];
  return (
    <>
      <p role="status">
        {plural(taken, "checkpoint")} {taken === 1 ? "is" : "are"} committed again. What a policy had expired is pinned
        for a while, so that it does not expire at once again.
      </p>
      {failures.length === 1 && first && <ErrorState error={first.error} />}
      {failures.length > 1 && (
        <ul className={styles.said}>
          {failures.slice(0, SHOWN_LEFT).map(({ id, error }) => (
            <li key={id}>
              <code>{id}</code>: {failureOf(error).detail}
            </li>
          ))}
        </ul>
      )}
    </>
  );
}
