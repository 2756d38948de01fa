import { createRoute, lazyRouteComponent } from "@tanstack/react-router";
import { frameRoute } from "@/app/frame_route";

interface StorageSearch {
  /** The run of drills, scrubs and tiers. */
  run?: string | undefined;
  /** Of the second store only the runs that miss their objective (RPO). */
  late?: true | undefined;
}

export const storageRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/storage",
  validateSearch: (search: Record<string, unknown>): StorageSearch => ({
    // The router reads a name of digits as a number.
    run: search.run === undefined || search.run === "" ? undefined : String(search.run),
    late: search.late === true || undefined,
  }),
  component: lazyRouteComponent(() => import("./StorageScreen"), "StorageScreen"),
});
