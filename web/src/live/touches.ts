import type { QueryKey } from "@tanstack/react-query";
import type { Schemas } from "@/api/client";

type EventType = Schemas["EventType"];
type EventData = Schemas["EventData"];

/** What each event changes: words of the paths whose replies are asked for again. A type that is missing here is an
 * error of the compiler. */
const TOUCHED: Record<EventType, readonly string[]> = {
  "attempt.failed": ["runs", "attempts", "metrics-history", "goodput", "advice"],
  "attempt.lost": ["runs", "attempts", "metrics-history", "goodput", "advice"],
  "attempt.revived": ["runs", "attempts", "metrics-history", "goodput", "advice"],
  "attempt.preempted": ["runs", "attempts", "metrics-history", "goodput", "advice"],
  "attempt.finished": ["runs", "attempts", "metrics-history", "goodput", "advice"],
  "run.stalled": ["runs", "attempts"],
  "run.goes_on": ["runs", "attempts"],
  "restore.started": ["runs", "attempts"],
  "restore.finished": ["runs", "attempts", "metrics-history", "goodput"],
  "checkpoint.committed": ["runs", "checkpoints", "restore-point", "usage", "cost", "copies", "projects", "plan"],
  "checkpoint.aborted": ["checkpoints"],
  "checkpoint.trashed": ["runs", "checkpoints", "restore-point", "usage", "plan", "audit-events"],
  "checkpoint.purged": ["runs", "checkpoints", "usage", "cost", "projects", "audit-events"],
  "checkpoint.quarantined": ["runs", "checkpoints", "restore-point", "audit-events"],
  "checkpoint.diverged": ["runs", "checkpoints", "restore-point"],
  "checkpoint.corrupt": ["runs", "checkpoints", "restore-point", "bad-copies", "audit-events"],
  "drill.succeeded": ["operations", "copies", "drills"],
  "drill.failed": ["operations", "copies", "drills"],
  "store.unavailable": ["stores", "controllers", "restore-point"],
  "store.available": ["stores", "controllers", "restore-point"],
  "quota.near": ["projects"],
  "quota.reached": ["projects"],
  "quota.relieved": ["projects"],
  "webhook.test": ["deliveries"],
};

export const EVENT_TYPES = Object.keys(TOUCHED) as EventType[];

/** The last word of a path that names no one thing: what its reply is about. */
export function nounOf(path: string): string | undefined {
  return path
    .split("/")
    .filter((word) => word && !word.startsWith("{"))
    .at(-1);
}

/** Lists of every project: an event of one project would ask again for all of them. They are asked by the clock. */
const OF_ALL_PROJECTS = ["/v1/runs", "/v1/checkpoints"];

/** Whether the reply of a query may have changed with an event. A query belongs to the noun that its path ends with;
 * of another project, run or checkpoint than the event's it is left alone. */
export function touches(type: string, data: EventData, key: QueryKey): boolean {
  const [, path, init] = key;
  if (typeof path !== "string" || OF_ALL_PROJECTS.includes(path)) return false;
  const noun = nounOf(path);
  const words = [...(TOUCHED[type as EventType] ?? []), "events"];
  if (noun === undefined || !words.includes(noun)) return false;
  const params = (init as { params?: { path?: object; query?: object } } | undefined)?.params;
  const asked: Record<string, unknown> = { ...params?.query, ...params?.path };
  const differs = (name: string, of: unknown) => of != null && asked[name] != null && asked[name] !== of;
  return !(
    differs("project", data.project) ||
    differs("run", data.run) ||
    differs("checkpoint_id", data.checkpoint_id)
  );
}
