import styles from "./StateBadge.module.css";

type Tone = "good" | "warn" | "bad" | "calm";

/** States of runs, checkpoints, copies, operations and attempts, by the API's own words. */
const TONES: Record<string, Tone> = {
  training: "good",
  finished: "good",
  committed: "good",
  healthy: "good",
  done: "good",
  succeeded: "good",
  delivered: "good",
  ready: "good",
  stalled: "bad",
  failed: "bad",
  lost: "bad",
  corrupt: "bad",
  diverged: "bad",
  aborted: "bad",
  unavailable: "bad",
  bad: "bad",
  quarantined: "warn",
  preempted: "warn",
  trashed: "warn",
  paused: "warn",
  cancelled: "warn",
  fenced: "warn",
  unproven: "warn",
};

/** The word says the state; the colour only repeats it. */
export function StateBadge({ state, tone }: { state: string; tone?: Tone }) {
  return (
    <span className={`${styles.badge} ${styles[tone ?? TONES[state] ?? "calm"]}`}>{state.replaceAll("_", " ")}</span>
  );
}
