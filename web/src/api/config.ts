import { queryOptions } from "./client";

/** The configuration of an attempt, compared with that of `against`; without it, with the newest one before. */
export function configQuery(project: string, run: string, number: number, against?: number) {
  const query = against === undefined ? {} : { against };
  return queryOptions("get", "/v1/projects/{project}/runs/{run}/attempts/{number}/config", {
    params: { path: { project, run, number }, query },
  });
}
