import { api, queryClient, type Schemas } from "@/api/client";
import { ProblemError } from "@/api/problem";
import type { PolicyDocument } from "./rules";

/** So many checkpoints go in one call, at most: MAX_AT_ONCE of the API. */
const MOST_AT_ONCE = 2000;
/** Calls at a time, of many: the service serves others, too. */
const AT_A_TIME = 4;

type Plan = Schemas["RetentionPlan"];

/** What one call moves to the trash: checkpoints of one run. */
export interface Part {
  run: string;
  ids: readonly string[];
}

/** Hears of each part that is over. `error`: why the service did not do it. */
export type OnPart = (part: Part, error?: unknown) => void;

/** A part that the service did not do, and why. */
export interface Failure extends Part {
  error: unknown;
}

/** What became of an action: the same for a policy that was applied and for a prune. */
export interface Outcome {
  trashed: Schemas["PrunedCheckpoint"][];
  left: (Schemas["LeftCheckpoint"] & { run: string })[];
  /** So many were asked for, and the service named them in neither list: they are in the trash already, for example by a
   * call whose reply was lost, or match no longer. */
  unnamed: number;
  freedBytes: number;
  /** The earliest purge; null: nothing is in the trash. */
  purgeAt: string | null;
  /** A policy expired them: while room is short they are purged before that. */
  byPolicy: boolean;
  /** The action also put a policy. */
  isSaved: boolean;
  failures: readonly Failure[];
  /** Does again what failed and may succeed, and gives all that was done since the beginning. null: nothing may. */
  retry: (() => Promise<Outcome>) | null;
}

/** Does each, a few at a time, and gives the results in order. Once one fails, no other is begun. `onDone` hears how many
 * are done. */
export async function eachOf<Item, Result>(
  items: readonly Item[],
  task: (item: Item) => Promise<Result>,
  { signal, onDone }: { signal?: AbortSignal; onDone?: (count: number) => void } = {},
): Promise<Result[]> {
  const results: Result[] = [];
  const rest = items.entries();
  let done = 0;
  let hasFailed = false;
  async function work() {
    for (const [index, item] of rest) {
      signal?.throwIfAborted();
      try {
        results[index] = await task(item);
      } catch (error) {
        hasFailed = true;
        throw error;
      }
      if (hasFailed) return;
      done += 1;
      onDone?.(done);
    }
  }
  await Promise.all(Array.from({ length: AT_A_TIME }, work));
  return results;
}

/** Does part after part. A part that fails takes nothing from the others; a failure that would meet each of them (no
 * connection, a token that is over) ends the work, and the rest is among the failures. Throws if nothing at all is done. */
async function doParts(
  parts: readonly Part[],
  task: (part: Part) => Promise<Schemas["Pruned"]>,
  before: Outcome,
  onPart?: OnPart,
): Promise<Outcome> {
  const outcome = { ...before, trashed: [...before.trashed], left: [...before.left] };
  const failures: Failure[] = [];
  let ended: { error: unknown } | null = null;
  for (const part of parts) {
    try {
      if (ended !== null) throw ended.error;
      const done = await task(part);
      outcome.trashed.push(...done.trashed);
      outcome.left.push(...done.left.map((each) => ({ ...each, run: part.run })));
      outcome.unnamed += part.ids.length - done.trashed.length - done.left.length;
      outcome.freedBytes += done.freed.bytes;
      outcome.purgeAt = [outcome.purgeAt, done.purge_at].filter((at) => at !== null).sort()[0] ?? null;
      onPart?.(part);
    } catch (error) {
      failures.push({ ...part, error });
      onPart?.(part, error);
      if (!isOfOnePart(error)) ended = { error };
    }
  }
  refresh();
  const isNothingDone = !outcome.isSaved && outcome.trashed.length + outcome.left.length === 0;
  // Then the dialog stays, with all that was typed into it.
  if (isNothingDone && failures[0] !== undefined && !failures.some((each) => isPolicyChanged(each.error)))
    throw failures[0].error;
  // Under another policy the same request is refused for ever: the reader must look at its plan first.
  const final = failures.filter((each) => isPolicyChanged(each.error));
  const again = failures.filter((each) => !isPolicyChanged(each.error));
  outcome.failures = [...before.failures, ...final, ...again];
  const kept = { ...outcome, failures: [...before.failures, ...final] };
  outcome.retry = again.length === 0 ? null : () => doParts(again, task, kept);
  return outcome;
}

const NOTHING_DONE: Outcome = {
  trashed: [],
  left: [],
  unnamed: 0,
  freedBytes: 0,
  purgeAt: null,
  byPolicy: false,
  isSaved: false,
  failures: [],
  retry: null,
};

const OF_ALL = new Set([401, 403, 429]);

/** Whether the same call for another run would meet it too: no connection, a token that is over. */
export function isOfAll(error: unknown): boolean {
  return !(error instanceof ProblemError) || OF_ALL.has(error.problem.status);
}

function isOfOnePart(error: unknown): boolean {
  if (error instanceof PolicyChanged) return true;
  return error instanceof ProblemError && error.problem.status < 500 && !isOfAll(error);
}

/** The policy that was put is not the one that holds any more. */
class PolicyChanged extends Error {}

/** Whether the plan that was seen is one of another policy than the one in force. */
function isPolicyChanged(error: unknown): boolean {
  return error instanceof PolicyChanged || (error instanceof ProblemError && error.problem.code === "policy_changed");
}

export async function planOf(
  project: string,
  run: string,
  policy: PolicyDocument | null,
  show: Schemas["PlanRetention"]["show"],
  signal?: AbortSignal,
): Promise<Plan> {
  const { data } = await api.POST("/v1/projects/{project}/runs/{run}/retention/plan", {
    params: { path: { project, run } },
    body: { policy, show },
    ...(signal ? { signal } : {}),
  });
  return data as Plan;
}

/** Where a policy is put. `own`: the policy that this level has now; null: none. */
export interface Level {
  kind: Schemas["PolicyKind"];
  project: string;
  /** null: the project's. */
  run: string | null;
  own: Schemas["PolicyView"] | null;
}

/** What a reader has seen, and says yes to. */
export interface Seen {
  level: Level;
  document: PolicyDocument;
  /** `document` is an edit that is not saved: the plans are those under it. */
  edited: boolean;
  /** Of the runs that the policy holds for. */
  plans: readonly Plan[];
}

/** Puts an edited policy, and expires what the plans have shown, each by the policy that it was made by. What the service
 * keeps by now is kept, and is told. Throws if the policy cannot be put: then nothing is done. */
export async function applyPolicy({ level, document, edited, plans }: Seen): Promise<Outcome> {
  const { project } = level;
  const put = edited ? await putPolicy(level, document) : null;
  const digests = new Map(plans.map((seen) => [seen.run, seen.policy_digest]));
  const digestOf = put === null ? async (run: string) => digests.get(run) : digestOfPut(project, put);
  const parts = plans.flatMap(({ run, checkpoints }) =>
    portions(checkpoints.filter((each) => !each.keep).map((each) => each.checkpoint_id)).map((ids) => ({ run, ids })),
  );
  return doParts(
    parts,
    async ({ run, ids }) => {
      const policy_digest = await digestOf(run);
      if (policy_digest == null) throw new PolicyChanged(`No policy holds for ${run} any more.`);
      const { data } = await api.POST("/v1/projects/{project}/runs/{run}/retention/apply", {
        params: { path: { project, run } },
        body: { policy_digest, checkpoint_ids: [...ids] },
      });
      return data as Schemas["Pruned"];
    },
    { ...NOTHING_DONE, byPolicy: true, isSaved: put !== null },
  );
}

/** The digest of a policy that was just put. A plan under an edit has none, and the policy that holds by now may be
 * somebody else's: then the plan that was seen is not the one that would be applied. */
function digestOfPut(project: string, put: Schemas["PolicyView"]): (run: string) => Promise<string> {
  let found: string | null = null;
  return async (run) => {
    if (found === null) {
      const { policy, policy_digest } = await planOf(project, run, null, "none");
      if (policy_digest === null || policy?.level !== put.level || policy.etag !== put.etag)
        throw new PolicyChanged(`Another policy holds for ${run} by now. Nothing of it was expired; look at its plan.`);
      found = policy_digest;
    }
    return found;
  };
}

async function putPolicy({ kind, project, run, own }: Level, document: PolicyDocument): Promise<Schemas["PolicyView"]> {
  const header = own === null ? {} : { "if-match": own.etag };
  const body = { document };
  const { data } =
    run === null
      ? await api.PUT("/v1/projects/{project}/policies/{kind}", {
          params: { path: { project, kind }, header },
          body,
        })
      : await api.PUT("/v1/projects/{project}/runs/{run}/policies/{kind}", {
          params: { path: { project, run, kind }, header },
          body,
        });
  return data as Schemas["PolicyView"];
}

/** Puts a policy by which nothing is expired. */
export async function savePolicy(level: Level, document: PolicyDocument): Promise<void> {
  await putPolicy(level, document);
  refresh();
}

export async function deletePolicy({ kind, project, run, own }: Level): Promise<void> {
  if (own === null) return;
  const header = { "if-match": own.etag };
  if (run === null) {
    await api.DELETE("/v1/projects/{project}/policies/{kind}", {
      params: { path: { project, kind }, header },
    });
  } else {
    await api.DELETE("/v1/projects/{project}/runs/{run}/policies/{kind}", {
      params: { path: { project, run, kind }, header },
    });
  }
  refresh();
}

/** What is asked of a run, or of several. */
export interface Wanted {
  project: string;
  filter: Schemas["PruneFilter"];
  allOfRun: boolean;
}

/** Moves to the trash what was shown of each run and still matches. */
export async function pruneShown(
  { project, filter, allOfRun }: Wanted,
  shown: readonly Part[],
  reason: string,
  onPart?: OnPart,
): Promise<Outcome> {
  return doParts(
    shown.flatMap(({ run, ids }) => portions(ids).map((each) => ({ run, ids: each }))),
    async ({ run, ids }) => {
      const { data } = await api.POST("/v1/projects/{project}/runs/{run}/retention/prune", {
        params: { path: { project, run } },
        body: { filter, all_of_run: allOfRun, dry_run: false, checkpoint_ids: [...ids], reason },
      });
      return data as Schemas["Pruned"];
    },
    NOTHING_DONE,
    onPart,
  );
}

export interface TakenBack {
  taken: number;
  /** Why the others are not back. */
  failures: { id: string; error: unknown }[];
}

/** Takes checkpoints back from the trash, each by itself: one that is purged already holds up no other. */
export async function takeBack(ids: readonly string[]): Promise<TakenBack> {
  const failures: TakenBack["failures"] = [];
  await eachOf(ids, async (id) => {
    try {
      await api.POST("/v1/checkpoints/{checkpoint_id}/undelete", {
        params: { path: { checkpoint_id: id } },
        body: {},
      });
    } catch (error) {
      failures.push({ id, error });
    }
  });
  refresh();
  return { taken: ids.length - failures.length, failures };
}

export async function takeRunBack(project: string, run: string): Promise<Schemas["TakenBack"]> {
  const { data } = await api.POST("/v1/projects/{project}/runs/{run}/undelete", { params: { path: { project, run } } });
  refresh();
  return data as Schemas["TakenBack"];
}

export async function takeProjectBack(project: string): Promise<void> {
  await api.POST("/v1/projects/{project}/undelete", { params: { path: { project } } });
  refresh();
}

/** Bytes, costs, restore points, lists: nearly all that is shown may have changed. */
function refresh(): void {
  void queryClient.invalidateQueries();
}

function portions(ids: readonly string[]): string[][] {
  const count = Math.ceil(ids.length / MOST_AT_ONCE);
  return Array.from({ length: count }, (_, index) => ids.slice(index * MOST_AT_ONCE, (index + 1) * MOST_AT_ONCE));
}
