import { useQuery } from "@/api/client";

/** What more than one part of the screen reads: each is asked for once. */

export function useRun(project: string, run: string) {
  return useQuery("get", "/v1/projects/{project}/runs/{run}", { params: { path: { project, run } } });
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
  return useQuery("get", "/v1/projects/{project}/runs/{run}/restore-point", { params: { path: { project, run } } });
}
