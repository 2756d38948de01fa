import { createRootRoute, retainSearchParams } from "@tanstack/react-router";
import { Frame } from "./Frame";

export interface FrameSearch {
  /** The project whose runs are shown: each link keeps it. */
  project?: string | undefined;
}

/** Around each screen. A screen's own route names it as its parent, and adds search parameters of its own. */
export const frameRoute = createRootRoute({
  validateSearch: (search: Record<string, unknown>): FrameSearch => ({
    project: typeof search.project === "string" && search.project !== "" ? search.project : undefined,
  }),
  search: { middlewares: [retainSearchParams(["project"])] },
  component: Frame,
});
