import { keepPreviousData, queryOptions, useQuery as useQueryOf } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { api, type Schemas, useQuery } from "@/api/client";
import { isRetryable, ProblemError } from "@/api/problem";
import { eachOf, planOf } from "./actions";
import type { RetentionSearch } from "./route";
import type { PolicyDocument } from "./rules";

/** Runs of a project that are looked at together: a plan reads each checkpoint of a run. */
export const MOST_RUNS = 200;

export function useRetentionSearch(): RetentionSearch {
  return useSearch({ from: "/retention" });
}

/** Changes the address; what is undefined is taken out of it. */
export function useChangeSearch(): (change: RetentionSearch, how?: { replace?: boolean }) => void {
  const navigate = useNavigate({ from: "/retention" });
  return (change, how = {}) => void navigate({ search: (old) => ({ ...old, ...change }), resetScroll: false, ...how });
}

/** The newest runs of a project, for choosing and for adding up. */
export function useRuns(project: string) {
  return useQuery("get", "/v1/projects/{project}/runs", { params: { path: { project }, query: { limit: MOST_RUNS } } });
}

/** The policy that holds for a run, or the project's. null: there is none. */
export function policyQuery(project: string, run: string | undefined) {
  const path = run === undefined ? { project } : { project, run };
  return queryOptions({
    queryKey: ["get", "/v1/projects/{project}/policies", { params: { path } }],
    queryFn: async ({ signal }): Promise<Schemas["PolicyView"] | null> => {
      try {
        const { data } =
          run === undefined
            ? await api.GET("/v1/projects/{project}/policies/{kind}", {
                params: { path: { project, kind: "retention" } },
                signal,
              })
            : await api.GET("/v1/projects/{project}/runs/{run}/policies/{kind}", {
                params: { path: { project, run, kind: "retention" } },
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

/** Plans of runs under a policy (null: the one in force). Of several runs only what would go is listed. */
export function usePlans(
  project: string,
  runs: readonly string[],
  policy: PolicyDocument | null,
  show: "all" | "expire",
) {
  return useQueryOf({
    queryKey: [
      "post",
      "/v1/projects/{project}/runs/{run}/retention/plan",
      { params: { path: { project } }, body: { runs, policy, show } },
    ],
    queryFn: ({ signal }) => eachOf(runs, (run) => planOf(project, run, policy, show, signal)),
    placeholderData: keepPreviousData,
    retry: (failures, error) => failures < 2 && isRetryable(error),
  });
}
