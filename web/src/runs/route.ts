import { createRoute, lazyRouteComponent } from "@tanstack/react-router";
import type { Schemas } from "@/api/client";
import { frameRoute } from "@/app/frame_route";

export type RunStatus = Schemas["RunStatus"];

/** Each status once; one that is missing is an error of the compiler. */
const EACH: Record<RunStatus, true> = {
  training: true,
  stalled: true,
  lost: true,
  failed: true,
  preempted: true,
  finished: true,
  idle: true,
};
export const RUN_STATUSES = Object.keys(EACH) as RunStatus[];

interface RunsSearch {
  status?: RunStatus | undefined;
  /** Those alone that have it. */
  tag?: string | undefined;
}

export const runsRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/runs",
  validateSearch: (search: Record<string, unknown>): RunsSearch => ({
    status: RUN_STATUSES.find((each) => each === search.status),
    // A router reads `tag=7` as a number.
    tag: typeof search.tag === "string" || typeof search.tag === "number" ? String(search.tag) || undefined : undefined,
  }),
  component: lazyRouteComponent(() => import("./RunsScreen"), "RunsScreen"),
});
