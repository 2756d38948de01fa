import { keepPreviousData, queryOptions, useQuery as useQueryOf } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useState } from "react";
import { api, queryClient, type Schemas } from "@/api/client";
import { isRetryable, ProblemError } from "@/api/problem";
import { eachOf, planOf } from "./actions";
import type { RetentionSearch } from "./route";
import type { PolicyDocument } from "./rules";

export function useRetentionSearch(): RetentionSearch {
  return useSearch({ from: "/retention" });
}

/** Changes the address; what is undefined is taken out of it. */
export function useChangeSearch(): (change: RetentionSearch, how?: { replace?: boolean }) => void {
  const navigate = useNavigate({ from: "/retention" });
  return (change, how = {}) => void navigate({ search: (old) => ({ ...old, ...change }), resetScroll: false, ...how });
}

/** The policy of a kind that holds for a run, or the project's. null: there is none. */
export function policyQuery(project: string, run: string | undefined, kind: Schemas["PolicyKind"] = "retention") {
  const path = run === undefined ? { project, kind } : { project, run, kind };
  return queryOptions({
    queryKey: ["get", "/v1/projects/{project}/policies", { params: { path } }],
    queryFn: async ({ signal }): Promise<Schemas["PolicyView"] | null> => {
      try {
        const { data } =
          run === undefined
            ? await api.GET("/v1/projects/{project}/policies/{kind}", {
                params: { path: { project, kind } },
                signal,
              })
            : await api.GET("/v1/projects/{project}/runs/{run}/policies/{kind}", {
                params: { path: { project, run, kind } },
                signal,
              });
        return data ?? null;
      } catch (error) {
        if (error instanceof ProblemError && error.problem.code === "policy_not_found") return null;
        throw error;
      }
    },
  });
}

type Shown = Schemas["PlanRetention"]["show"];

/** What a plan is asked by. `edition`: of the policy in force. No event tells that another one was put. */
interface Asked {
  project: string;
  /** null: the policy in force. */
  policy: PolicyDocument | null;
  edition: string | undefined;
}

const PLAN = "/v1/projects/{project}/runs/{run}/retention/plan";
/** For a call of many, one for each run: one that waits for its retry takes nothing from the others. */
export const retry = (failures: number, error: Error) => failures < 2 && isRetryable(error);

function planQuery({ project, policy, edition }: Asked, run: string, show: Shown) {
  return queryOptions({
    queryKey: ["post", PLAN, { params: { path: { project, run } }, body: { policy, show } }, edition],
    queryFn: ({ signal }) => planOf(project, run, policy, show, signal),
    retry,
  });
}

/** The plan of one run. */
export function usePlan(asked: Asked, run: string) {
  return useQueryOf({ ...planQuery(asked, run, "all"), placeholderData: keepPreviousData });
}

/** An event names its run: the plans of the others hold on. A service that says nothing is asked after so long. */
const PLANS_HOLD_MS = 5 * 60_000;

/** The plans of all these runs; of each only what expires is listed. All or none: one that cannot be made is the error,
 * for a sum without it would be less than what expires. `planned`: how many are made so far. */
export function usePlans(asked: Asked, runs: readonly string[]) {
  const [planned, setPlanned] = useState(0);
  const { project, policy, edition } = asked;
  const plans = useQueryOf({
    queryKey: ["post", PLAN, { params: { path: { project } }, body: { runs, policy } }, edition],
    queryFn: async ({ signal }) => {
      setPlanned(0);
      const found = await eachOf(runs, (run) => planUnlessDeleted(asked, run), { signal, onDone: setPlanned });
      return found.filter((plan) => plan !== null);
    },
    placeholderData: keepPreviousData,
    retry,
  });
  return { plans, planned };
}

async function planUnlessDeleted(asked: Asked, run: string): Promise<Schemas["RetentionPlan"] | null> {
  try {
    return await queryClient.fetchQuery({ ...planQuery(asked, run, "expire"), staleTime: PLANS_HOLD_MS });
  } catch (error) {
    if (error instanceof ProblemError && error.problem.code === "run_not_found") return null;
    throw error;
  }
}
