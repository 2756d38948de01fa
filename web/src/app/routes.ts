import { createRouter } from "@tanstack/react-router";
import { checkpointRoute, compareRoute, finderRoute } from "@/checkpoint/route";
import { operationsRoutes } from "@/operations/route";
import { overviewRoute } from "@/overview/route";
import { retentionRoute } from "@/retention/route";
import { runRoute } from "@/run/route";
import { runsRoute } from "@/runs/route";
import { storageRoute } from "@/storage/route";
import { frameRoute } from "./frame_route";
import { NotFound, ScreenFailed } from "./ScreenFailed";

/** A screen: one line. What the navigation offers is in navigation.ts. */
const screens = frameRoute.addChildren([
  overviewRoute,
  operationsRoutes,
  runsRoute,
  runRoute,
  retentionRoute,
  finderRoute,
  checkpointRoute,
  compareRoute,
  storageRoute,
]);

export function makeRouter() {
  return createRouter({
    routeTree: screens,
    basepath: "/ui",
    defaultPreload: "intent",
    defaultErrorComponent: ScreenFailed,
    defaultNotFoundComponent: NotFound,
    scrollRestoration: true,
  });
}

declare module "@tanstack/react-router" {
  interface Register {
    router: ReturnType<typeof makeRouter>;
  }
}
