import { queryOptions, useQuery } from "@tanstack/react-query";
import { api, type Schemas } from "@/api/client";

/** MAX_PAGE of the API. */
const PAGE = 500;

/** Every run of a project, the newest first, for what must not leave one out: choosing, and adding up. */
export function allRunsQuery(project: string) {
  return queryOptions({
    queryKey: ["get", "/v1/projects/{project}/runs", { params: { path: { project } } }, "all"],
    queryFn: async ({ signal }): Promise<Schemas["RunView"][]> => {
      const runs: Schemas["RunView"][] = [];
      let cursor: string | null = null;
      do {
        const query: { limit: number; cursor?: string } = { limit: PAGE, ...(cursor === null ? {} : { cursor }) };
        const { data } = await api.GET("/v1/projects/{project}/runs", { params: { path: { project }, query }, signal });
        const page = data as Schemas["Page_RunView_"];
        runs.push(...page.items);
        cursor = page.next_cursor ?? null;
      } while (cursor !== null);
      return runs;
    },
  });
}

export function useAllRuns(project: string) {
  return useQuery(allRunsQuery(project));
}
