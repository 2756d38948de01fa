import { useQuery } from "@/api/client";
import { ASKED_AGAIN } from "@/live/refresh";

/** What more than one part of the screen reads: each is asked for once. */

/** A heartbeat brings steps and points, and no event tells of it: a job reports about so often, if nobody has told it
 * otherwise. */
export const HEARTBEAT_MS = 30_000;
/** No event tells of a launch either. */
export const UNTIL_LAUNCHED_MS = 60_000;

export function useRun(project: string, run: string) {
  return useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}",
    { params: { path: { project, run } } },
    {
      refetchInterval: ({ state: { data } }) =>
        data?.status === "training" || data?.status === "stalled" ? HEARTBEAT_MS : UNTIL_LAUNCHED_MS,
    },
  );
}

export function useGoodput(project: string, run: string) {
  return useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/goodput",
    { params: { path: { project, run } } },
    { staleTime: 60_000 },
  );
}

export function useRestorePoint(project: string, run: string) {
  return useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/restore-point",
    { params: { path: { project, run } } },
    // A thaw, its end, a copy that is made: no event tells of these.
    { refetchInterval: ASKED_AGAIN.askedAgainAfter },
  );
}
