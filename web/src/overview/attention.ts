import type { Schemas } from "@/api/client";
import { formatSeconds, secondsSince } from "@/format/moments";
import { formatBytes, formatShare } from "@/format/numbers";
import { plural } from "@/format/words";
import { QUOTA_NEAR, quotaShare } from "@/storage/share_of_quota";

/** One thing that needs attention. */
export interface Attention {
  key: string;
  /** In the words of the glossary; what StateBadge shows. */
  state: string;
  tone: "bad" | "warn";
  /** What it is about. */
  subject: string;
  /** Whose it is, if it is a run's or a checkpoint's. */
  project: string | null;
  /** The screen where something can be done about it. */
  to: Place;
  detail: string;
  /** Since when, if that is known. */
  since: string | null;
}

export type Place =
  | { screen: "run"; run: string }
  | { screen: "checkpoint"; id: string }
  | { screen: "storage" | "usage" };

export interface Facts {
  /** Stalled, lost and failed ones, and those that train. */
  runs: readonly Schemas["RunView"][];
  badCopies: readonly Schemas["BadCopy"][];
  /** The list was read to its end. */
  hasAllBadCopies: boolean;
  /** Committed ones that are corrupt or quarantined. */
  badCheckpoints: readonly Schemas["CheckpointView"][];
  /** That a checkpoint was quarantined or found corrupt, the newest first. */
  badEvents: readonly Schemas["EventView"][];
  /** That a store was unavailable or available again, the newest first. */
  storeEvents: readonly Schemas["EventView"][];
  stores: readonly Schemas["StoreView"][];
  project: Schemas["ProjectView"] | undefined;
}

/** What is older is in the list of runs and of events alone. */
export const RECENT_SECONDS = 7 * 86_400;
/** A live run that has nothing newer to go back to loses so much. The alert HoldfastNoRestorePoint has the same number. */
const RESTORE_POINT_LATE_SECONDS = 7200;

/** What needs attention, the most urgent first: lost data, stores, runs that go nowhere, runs without protection, quota.
 * `now`: milliseconds since 1970. */
export function findAttention(facts: Facts, now: number): Attention[] {
  return [
    ...lostChunks(facts.badCopies, facts.hasAllBadCopies),
    ...stores(facts.stores, facts.storeEvents),
    ...badCheckpoints(facts.badCheckpoints, facts.badEvents, now),
    ...stopped(facts.runs, now),
    ...unprotected(facts.runs, now),
    ...quota(facts.project),
  ];
}

/** A chunk can have bad copies in several stores, and under several encodings: it is one chunk. */
function lostChunks(copies: Facts["badCopies"], isWhole: boolean): Attention[] {
  const lost = copies.filter((copy) => copy.lost);
  if (lost.length === 0) return [];
  const chunks = new Set(lost.map((copy) => `${copy.digest} ${copy.bytes}`)).size;
  const checkpoints = lost.reduce((most, copy) => Math.max(most, copy.checkpoints), 0);
  const detail =
    `${isWhole ? "" : "At least "}${plural(chunks, "chunk")} (${plural(lost.length, "bad copy", "bad copies")}) without ` +
    `a good copy in any attached store; the worst is needed by ${plural(checkpoints, "checkpoint")}. Attach a store that still has it, or restore an older checkpoint.`;
  const since = lost.map((copy) => copy.bad_at ?? "").filter(Boolean);
  return [
    {
      key: "corrupt",
      state: "corrupt",
      tone: "bad",
      subject: "Lost chunks",
      project: null,
      to: { screen: "storage" },
      detail,
      since: since.sort()[0] ?? null,
    },
  ];
}

function stores(found: Facts["stores"], events: Facts["storeEvents"]): Attention[] {
  const newest = new Map<string, Schemas["EventView"]>();
  for (const event of events) {
    const role = event.data.store;
    if (role != null && !newest.has(role)) newest.set(role, event);
  }
  const away = [...newest].filter(([, event]) => event.type === "store.unavailable");
  return [
    ...away.map(
      ([role, event]): Attention => ({
        key: `store ${role}`,
        state: "unavailable",
        tone: "bad",
        subject: `Store: ${role}`,
        project: null,
        to: { screen: "storage" },
        detail: event.data.reason ?? "A process of the service cannot use it.",
        since: event.timestamp,
      }),
    ),
    ...found
      .filter((store) => store.problem != null && !away.some(([role]) => role === store.role))
      .map(
        (store): Attention => ({
          key: `store ${store.role}`,
          state: "problem",
          tone: "bad",
          subject: `Store: ${store.role}`,
          project: null,
          to: { screen: "storage" },
          detail: store.problem ?? "",
          since: null,
        }),
      ),
  ];
}

/** What is corrupt needs a person until it is repaired or deleted. What is quarantined is dealt with: it is told for as
 * long as it is news. */
function badCheckpoints(found: Facts["badCheckpoints"], events: Facts["badEvents"], now: number): Attention[] {
  const newest = new Map<string, Schemas["EventView"]>();
  for (const event of events) {
    const key = `${event.data.checkpoint_id} ${event.type}`;
    if (!newest.has(key)) newest.set(key, event);
  }
  return found
    .map((each) => ({ each, event: newest.get(`${each.id} checkpoint.${each.health}`) }))
    .filter(({ each, event }) => each.health === "corrupt" || (event !== undefined && isRecent(event.timestamp, now)))
    .map(({ each, event }) => {
      const detail = each.health_reason ?? event?.data.reason ?? "";
      const loops = each.health === "quarantined" && CRASH_LOOP.test(detail);
      return {
        key: `checkpoint ${each.id}`,
        state: loops ? "crash loop" : each.health,
        tone: "bad" as const,
        subject: `${each.run}, step ${each.step}`,
        project: each.project,
        // Of a crash loop the run: its attempts tell why.
        to: loops ? { screen: "run" as const, run: each.run } : { screen: "checkpoint" as const, id: each.id },
        detail,
        since: event?.timestamp ?? null,
      };
    })
    .sort((one, other) => (other.since ?? "").localeCompare(one.since ?? ""));
}

/** In the words with which the service puts a checkpoint in quarantine after a crash loop. */
const CRASH_LOOP = /^Attempts .+ crashed from step \d+/;

const STOPPED = ["stalled", "lost", "failed"];

function stopped(runs: Facts["runs"], now: number): Attention[] {
  return runs
    .filter((run) => STOPPED.includes(run.status ?? ""))
    .filter((run) => run.status === "stalled" || isRecent(run.last_heard_at, now))
    .sort((one, other) => STOPPED.indexOf(one.status ?? "") - STOPPED.indexOf(other.status ?? ""))
    .map((run) => ({
      key: `run ${run.id}`,
      state: run.status ?? "",
      tone: "bad" as const,
      subject: run.name,
      project: run.project,
      to: { screen: "run" as const, run: run.name },
      detail:
        run.status_detail ??
        `Its newest attempt is ${run.latest_attempt}; its last step ${run.last_step ?? "is unknown"}.`,
      since: run.last_heard_at ?? null,
    }));
}

function isRecent(moment: string | null | undefined, now: number): boolean {
  return moment == null || secondsSince(moment, now) < RECENT_SECONDS;
}

function unprotected(runs: Facts["runs"], now: number): Attention[] {
  return runs.flatMap((run) => {
    if (run.status !== "training" && run.status !== "stalled") return [];
    const detail = whyUnprotected(run, now);
    if (detail === null) return [];
    const since = run.restore_point?.committed_at ?? null;
    return [
      {
        key: `unprotected ${run.id}`,
        state: "unprotected",
        tone: "warn",
        subject: run.name,
        project: run.project,
        to: { screen: "run" as const, run: run.name },
        detail,
        since,
      },
    ];
  });
}

function whyUnprotected(run: Schemas["RunView"], now: number): string | null {
  const point = run.restore_point;
  if (point != null) {
    const age = secondsSince(point.committed_at, now);
    if (age < RESTORE_POINT_LATE_SECONDS) return null;
    return `It trains, and its restore point, step ${point.step}, is ${formatSeconds(age)} old.`;
  }
  if (run.committed_checkpoints > 0) {
    return `None of its ${plural(run.committed_checkpoints, "committed checkpoint")} can be restored now.`;
  }
  const age = secondsSince(run.created_at, now);
  if (age < RESTORE_POINT_LATE_SECONDS) return null;
  return `It has committed nothing in the ${formatSeconds(age)} since it was made.`;
}

function quota(project: Facts["project"]): Attention[] {
  if (project?.quota_bytes == null || project.quota_used_bytes < QUOTA_NEAR * project.quota_bytes) return [];
  const share = quotaShare(project.quota_used_bytes, project.quota_bytes);
  const detail =
    `${formatBytes(project.quota_used_bytes)} of ${formatBytes(project.quota_bytes)} are used in the primary store ` +
    `(${formatShare(share)}). ` +
    "At the quota saves are refused: free bytes by retention, or raise it.";
  const over = share >= 1;
  return [
    {
      key: "quota",
      state: over ? "quota reached" : "quota near",
      tone: over ? "bad" : "warn",
      subject: `Project ${project.name}`,
      project: null,
      to: { screen: "usage" },
      detail,
      since: null,
    },
  ];
}
