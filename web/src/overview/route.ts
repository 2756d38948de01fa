import { createRoute, lazyRouteComponent } from "@tanstack/react-router";
import { frameRoute } from "@/app/frame_route";

export const overviewRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/",
  component: lazyRouteComponent(() => import("./OverviewScreen"), "OverviewScreen"),
});
