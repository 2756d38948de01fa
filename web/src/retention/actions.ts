import { api, queryClient, type Schemas } from "@/api/client";
import { type PolicyDocument, sameRules } from "./rules";

/** So many checkpoints go in one call, at most: MAX_AT_ONCE of the API. */
const MOST_AT_ONCE = 2000;
/** Calls at a time, of many: the service serves others, too. */
const AT_A_TIME = 4;

type Plan = Schemas["RetentionPlan"];

/** What became of an action: the same for a policy that was applied and for a prune. */
export interface Outcome {
  trashed: Schemas["PrunedCheckpoint"][];
  left: Schemas["LeftCheckpoint"][];
  freedBytes: number;
  /** The earliest purge; null: nothing is in the trash. */
  purgeAt: string | null;
}

/** Does each, a few at a time, and gives the results in order. */
export async function eachOf<Item, Result>(
  items: readonly Item[],
  task: (item: Item) => Promise<Result>,
): Promise<Result[]> {
  const results: Result[] = [];
  const rest = items.entries();
  async function work() {
    for (const [index, item] of rest) results[index] = await task(item);
  }
  await Promise.all(Array.from({ length: AT_A_TIME }, work));
  return results;
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
  project: string;
  /** null: the project's. */
  run: string | null;
  own: Schemas["PolicyView"] | null;
}

/** The plans that a reader has seen, of the runs that the policy would hold for. */
export type SeenPlans = readonly Plan[];

/** Puts the policy, if it is another than the one that was seen, and expires what the plans have shown. What the service
 * keeps by now stays, and is told. */
export async function applyPolicy(level: Level, document: PolicyDocument, plans: SeenPlans): Promise<Outcome> {
  const { project, run, own } = level;
  const outcomes: Outcome[] = [];
  try {
    if (own === null || !sameRules(own.document, document)) await putPolicy(level, document);
    for (const seen of plans) {
      const ids = seen.checkpoints.filter((each) => !each.keep).map((each) => each.checkpoint_id);
      if (ids.length === 0) continue;
      const { policy_digest } = await planOf(project, seen.run, null, "none");
      if (policy_digest === null) throw new Error(`The policy of ${run ?? project} was deleted meanwhile. Look again.`);
      const path = { project, run: seen.run };
      for (const checkpoint_ids of portions(ids)) {
        const { data } = await api.POST("/v1/projects/{project}/runs/{run}/retention/apply", {
          params: { path },
          body: { policy_digest, checkpoint_ids },
        });
        outcomes.push(outcomeOf(data as Schemas["Pruned"]));
      }
    }
  } finally {
    refresh();
  }
  return together(outcomes);
}

async function putPolicy({ project, run, own }: Level, document: PolicyDocument): Promise<void> {
  const header = own === null ? {} : { "if-match": own.etag };
  const body = { document };
  if (run === null) {
    await api.PUT("/v1/projects/{project}/policies/{kind}", {
      params: { path: { project, kind: "retention" }, header },
      body,
    });
  } else {
    await api.PUT("/v1/projects/{project}/runs/{run}/policies/{kind}", {
      params: { path: { project, run, kind: "retention" }, header },
      body,
    });
  }
}

export async function deletePolicy({ project, run, own }: Level): Promise<void> {
  if (own === null) return;
  const header = { "if-match": own.etag };
  if (run === null) {
    await api.DELETE("/v1/projects/{project}/policies/{kind}", {
      params: { path: { project, kind: "retention" }, header },
    });
  } else {
    await api.DELETE("/v1/projects/{project}/runs/{run}/policies/{kind}", {
      params: { path: { project, run, kind: "retention" }, header },
    });
  }
  refresh();
}

export interface Prune {
  project: string;
  run: string;
  filter: Schemas["PruneFilter"];
  allOfRun: boolean;
}

/** Moves to the trash what was shown and still matches. */
export async function pruneShown(prune: Prune, ids: readonly string[], reason: string): Promise<Outcome> {
  const outcomes: Outcome[] = [];
  try {
    for (const checkpoint_ids of portions(ids)) {
      const { data } = await api.POST("/v1/projects/{project}/runs/{run}/retention/prune", {
        params: { path: { project: prune.project, run: prune.run } },
        body: { filter: prune.filter, all_of_run: prune.allOfRun, dry_run: false, checkpoint_ids, reason },
      });
      outcomes.push(outcomeOf(data as Schemas["Pruned"]));
    }
  } finally {
    refresh();
  }
  return together(outcomes);
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

export async function takeRunBack(project: string, run: string): Promise<void> {
  await api.POST("/v1/projects/{project}/runs/{run}/undelete", { params: { path: { project, run } } });
  refresh();
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

function outcomeOf(pruned: Schemas["Pruned"]): Outcome {
  return { trashed: pruned.trashed, left: pruned.left, freedBytes: pruned.freed.bytes, purgeAt: pruned.purge_at };
}

function together(outcomes: readonly Outcome[]): Outcome {
  const purges = outcomes.flatMap((each) => each.purgeAt ?? []).sort();
  return {
    trashed: outcomes.flatMap((each) => each.trashed),
    left: outcomes.flatMap((each) => each.left),
    freedBytes: outcomes.reduce((sum, each) => sum + each.freedBytes, 0),
    purgeAt: purges[0] ?? null,
  };
}
