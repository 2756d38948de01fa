import type { Schemas } from "@/api/client";
import { formatSeconds, secondsSince } from "@/format/moments";
import { formatBytes, formatCount, formatShare } from "@/format/numbers";
import { plural } from "@/format/words";
import { missedBy } from "@/storage/objectives";
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
  | { screen: "storage"; part: "stores" | "bad" | "second" | "drills"; run?: string | undefined }
  | { screen: "controller"; name: string }
  | { screen: "usage" };

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
  /** Of the runs that miss their objective (RPO), how far the second store is behind. */
  copies: readonly Schemas["RunCopies"][];
  /** The list was read to its end. */
  hasAllCopies: boolean;
  /** The newest first. */
  drills: readonly Schemas["OperationView"][];
  /** Of the runs that `failedDrills` names, those that were deleted since. */
  deletedRuns: ReadonlySet<string>;
  /** Undefined: it is not known, or the token may not see it. */
  scrub: Schemas["ControllerView"] | undefined;
  project: Schemas["ProjectView"] | undefined;
}

/** What is older is in the list of runs and of events alone. */
export const RECENT_SECONDS = 7 * 86_400;
/** A live run that has nothing newer to go back to loses so much. The alert HoldfastNoRestorePoint has the same number. */
const RESTORE_POINT_LATE_SECONDS = 7200;
/** An older drill says little of today. */
export const DRILL_RECENT_SECONDS = 30 * 86_400;
/** As the alert HoldfastScrubLate has it. */
const SCRUB_LATE_SECONDS = 86_400;

/** What needs attention, the most urgent first: lost data, stores, runs that go nowhere, runs without protection, missed
 * objectives, the scrub, quota. `now`: milliseconds since 1970. */
export function findAttention(facts: Facts, now: number): Attention[] {
  return [
    ...lostChunks(facts.badCopies, facts.hasAllBadCopies),
    ...stores(facts.stores, facts.storeEvents),
    ...badCheckpoints(facts.badCheckpoints, facts.badEvents, now),
    ...stopped(facts.runs, now),
    ...unprotected(facts.runs, now),
    ...secondStore(facts.copies, facts.hasAllCopies),
    ...drills(facts, now),
    ...scrub(facts.scrub),
    ...quota(facts.project),
    ...otherQuotas(facts.project),
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
      to: { screen: "storage", part: "bad" },
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
        to: { screen: "storage", part: "stores" },
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
          to: { screen: "storage", part: "stores" },
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

/** All runs that miss their RPO are one entry: with a second store that is away it would be each of them. */
function secondStore(copies: Facts["copies"], isWhole: boolean): Attention[] {
  const over = (of: Schemas["RunCopies"]) => (of.rpo_seconds ?? 0) - (of.rpo_objective_seconds ?? 0);
  const [worst] = copies.toSorted((one, other) => over(other) - over(one));
  if (worst === undefined) return [];
  const detail =
    `${isWhole ? "" : "At least "}${plural(copies.length, "run")} with states that lack a copy for longer than the objective (RPO) allows; ` +
    `the worst is ${worst.run}: ${formatSeconds(worst.rpo_seconds ?? 0)} of ${formatSeconds(worst.rpo_objective_seconds ?? 0)}.`;
  return [
    {
      key: "second store",
      state: "RPO missed",
      tone: "bad",
      subject: "Second store",
      project: null,
      to: { screen: "storage", part: "second" },
      detail: `${detail}${whyLate(worst)}`,
      since: null,
    },
  ];
}

function whyLate(of: Schemas["RunCopies"]): string {
  if (of.store === null) return " The service has no second store.";
  if (!of.policy) return " No policy asks for copies of it.";
  return of.error === null ? "" : ` The last try failed: ${of.error}`;
}

interface FailedDrill {
  key: string;
  run: string;
  since: string;
  drill: Schemas["OperationView"];
}

/** The last drill from each store of each run, if it failed or has not met an objective of its day. */
export function failedDrills(newestFirst: Facts["drills"], now: number): FailedDrill[] {
  const last = new Map<string, Schemas["OperationView"]>();
  for (const drill of newestFirst) {
    const key = `drill ${drill.run} ${drill.arguments.store}`;
    // One that was cancelled says nothing.
    if ((drill.state === "done" || drill.state === "failed") && !last.has(key)) last.set(key, drill);
  }
  return [...last].flatMap(([key, drill]) => {
    const since = drill.ended_at ?? drill.created_at;
    const isMet = drill.state === "done" && missedBy(drill).length === 0;
    if (isMet || drill.run === null || secondsSince(since, now) >= DRILL_RECENT_SECONDS) return [];
    return [{ key, run: drill.run, since, drill }];
  });
}

function drills({ drills: newestFirst, deletedRuns }: Facts, now: number): Attention[] {
  const found = failedDrills(newestFirst, now).filter(({ run }) => !deletedRuns.has(run));
  return found.map(({ key, run, since, drill }): Attention => {
    const missed = missedBy(drill);
    const told = missed.map(
      ({ name, value, objective }) => `${formatSeconds(value)} of ${formatSeconds(objective)} (${name})`,
    );
    const what = drill.state === "failed" ? (drill.error ?? "It failed.") : `${told.join(", ")}.`;
    return {
      key,
      state: drill.state === "failed" ? "drill failed" : `${missed.map(({ name }) => name).join(", ")} missed`,
      tone: "bad",
      subject: `Drill of ${run}`,
      project: null,
      to: { screen: "storage", part: "drills", run },
      detail: `From the ${drill.arguments.store} store alone: ${what}`,
      since,
    };
  });
}

function scrub(found: Facts["scrub"]): Attention[] {
  const late = found?.lag_seconds ?? 0;
  if (found === undefined || late <= SCRUB_LATE_SECONDS) return [];
  return [
    {
      key: "scrub",
      state: "scrub late",
      tone: "warn",
      subject: "Scrub",
      project: null,
      to: { screen: "controller", name: "scrub" },
      detail: `The oldest copy should have been read again ${formatSeconds(late)} ago. ${whyScrubLate(found)}`,
      since: null,
    },
  ];
}

function whyScrubLate(of: Schemas["ControllerView"]): string {
  if (of.paused_at !== null) return `It is paused: ${of.pause_reason ?? "no reason is given"}`;
  if (of.error !== null) return `Its last error: ${of.error}`;
  return "If it is too slow, raise HOLDFAST_SCRUB_BYTES_PER_SECOND.";
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

/** Of objects, runs, checkpoints and rows. */
function otherQuotas(project: Facts["project"]): Attention[] {
  return (project?.quotas ?? []).flatMap(({ kind, hard, used }): Attention[] => {
    if (kind === "bytes" || hard === null || used < QUOTA_NEAR * hard) return [];
    const over = used >= hard;
    const refused = kind === "runs" ? "no run is made" : "saves are refused";
    return [
      {
        key: `quota of ${kind}`,
        state: over ? "quota reached" : "quota near",
        tone: over ? "bad" : "warn",
        subject: `Project ${project?.name}`,
        project: null,
        to: { screen: "usage" },
        detail: `${formatCount(used)} of ${formatCount(hard)} ${kind}. At the quota ${refused}: delete some, or raise it.`,
        since: null,
      },
    ];
  });
}
