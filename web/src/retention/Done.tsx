import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { failureOf } from "@/api/problem";
import { Can } from "@/components/Can";
import { ErrorState } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { plural } from "@/format/numbers";
import { type Outcome, type TakenBack, takeBack } from "./actions";
import styles from "./Retention.module.css";

const SHOWN_LEFT = 20;

/** What an action has done, what of it failed, and how it is taken back. */
export function Done({ outcome, onChange }: { outcome: Outcome; onChange: (outcome: Outcome | null) => void }) {
  // Of the next action nothing is taken back yet.
  const [undone, setUndone] = useState<{ outcome: Outcome; back: TakenBack } | null>(null);
  const back = undone?.outcome === outcome ? undone.back : null;
  const setBack = (back: TakenBack) => setUndone({ outcome, back });
  const [busy, setBusy] = useState("");
  const [error, setError] = useState<unknown>(null);
  const { trashed, left, unnamed, purgeAt, byPolicy, freedBytes, isSaved, failures, retry } = outcome;
  const failed = failures.reduce((sum, each) => sum + each.ids.length, 0);

  async function work(what: string, task: () => Promise<void>) {
    setBusy(what);
    setError(null);
    await task().catch(setError);
    setBusy("");
  }

  return (
    <div className={styles.done} role="status">
      <p>
        <strong>
          {isSaved && "The policy is saved. "}
          {trashed.length === 0
            ? `Nothing ${unnamed > 0 ? "more " : ""}went to the trash.`
            : `${plural(trashed.length, "checkpoint")} went to the trash.`}
        </strong>{" "}
        {purgeAt !== null && back === null && (
          <>
            They can be taken back until <Time at={purgeAt} />
            {byPolicy && ", or until a disk or the quota is short"}. The collection after their purge then frees{" "}
            <Bytes count={freedBytes} />.
          </>
        )}
      </p>
      {left.length > 0 && (
        <>
          <p>
            {plural(left.length, "checkpoint")} {left.length === 1 ? "was" : "were"} kept, although shown as expiring:
          </p>
          <ul>
            {left.slice(0, SHOWN_LEFT).map((each) => (
              <li key={each.checkpoint_id}>
                {each.run}, step {each.step} of attempt {each.attempt}:{" "}
                {each.reasons.map((reason) => reason.detail).join("; ")}
              </li>
            ))}
            {left.length > SHOWN_LEFT && <li>and {plural(left.length - SHOWN_LEFT, "other")}</li>}
          </ul>
        </>
      )}
      {unnamed > 0 && (
        <p>
          {plural(unnamed, "checkpoint")} {unnamed === 1 ? "is" : "are"} in the trash already, or no longer{" "}
          {unnamed === 1 ? "matches" : "match"}. If the reply of a call was lost, that call may have moved them: the
          trash lists them.
        </p>
      )}
      {failures.length > 0 && (
        <div role="alert">
          <p>The service has not confirmed that {plural(failed, "checkpoint")} went to the trash:</p>
          <ul>
            {failures.slice(0, SHOWN_LEFT).map((each) => (
              <li key={`${each.run} ${each.ids[0]}`}>
                {each.run}, {plural(each.ids.length, "checkpoint")}: {failureOf(each.error).detail}
              </li>
            ))}
            {failures.length > SHOWN_LEFT && <li>and {plural(failures.length - SHOWN_LEFT, "other")}</li>}
          </ul>
        </div>
      )}
      {back !== null && <Back back={back} />}
      {error !== null && <ErrorState error={error} />}
      <div className="row">
        {trashed.length > 0 && back === null && (
          <Can scope="operate" reason={busy || undefined}>
            <button
              type="button"
              onClick={() =>
                void work("They are being taken back.", async () =>
                  setBack(await takeBack(trashed.map((each) => each.checkpoint_id))),
                )
              }
            >
              Undo: take {trashed.length === 1 ? "it" : `all ${trashed.length}`} back
            </button>
          </Can>
        )}
        {retry !== null && back === null && (
          <Can scope="operate" reason={busy || undefined}>
            <button
              type="button"
              onClick={() => void work("What failed is done again.", async () => onChange(await retry()))}
            >
              Retry what failed
            </button>
          </Can>
        )}
        {back !== null && back.failures.length > 0 && <BackAgain back={back} onBack={setBack} />}
        <Link from="/retention" to="/retention" search={(old) => ({ ...old, view: "trash" as const })}>
          Open the trash
        </Link>
        <button type="button" onClick={() => onChange(null)}>
          Close
        </button>
      </div>
    </div>
  );
}

/** Tries again to take back what is not back. */
function BackAgain({ back, onBack }: { back: TakenBack; onBack: (back: TakenBack) => void }) {
  const [busy, setBusy] = useState(false);

  async function again() {
    setBusy(true);
    const more = await takeBack(back.failures.map((each) => each.id));
    setBusy(false);
    onBack({ taken: back.taken + more.taken, failures: more.failures });
  }

  return (
    <Can scope="operate" reason={busy ? "They are being taken back." : undefined}>
      <button type="button" onClick={() => void again()}>
        Retry the {plural(back.failures.length, "other")}
      </button>
    </Can>
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
