import { api } from "./client";

/** What `GET …/attempts/{number}/config` says. By hand until schema.d.ts has the call: then `useQuery` takes its place. */
export interface ConfigView {
  attempt: number;
  /** Null: the job gave none. */
  config: Record<string, unknown> | null;
  /** Null: no attempt to compare with. */
  compared_with: number | null;
  differences: { path: string; before: unknown; after: unknown; change: string }[];
  differences_left_out: number;
}

/** The configuration of an attempt, compared with that of `against`; without it, with the newest one before. */
export function configQuery(project: string, run: string, attempt: number, against?: number) {
  const path = "/v1/projects/{project}/runs/{run}/attempts/{number}/config";
  const params = { path: { project, run, number: attempt }, query: against === undefined ? {} : { against } };
  return {
    queryKey: ["get", path, { params }],
    queryFn: async ({ signal }: { signal: AbortSignal }) => {
      const get = api.GET as unknown as (path: string, init: object) => Promise<{ data: ConfigView }>;
      return (await get(path, { params, signal })).data;
    },
  };
}
