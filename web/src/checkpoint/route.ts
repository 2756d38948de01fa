import { createRoute, lazyRouteComponent } from "@tanstack/react-router";
import { frameRoute } from "@/app/frame_route";

/** The parts of a checkpoint's screen, in their order. */
export const PARTS = ["summary", "tensors", "copies", "history"] as const;
export type Part = (typeof PARTS)[number];

interface FinderSearch {
  /** `project/run@selector`, or a checkpoint's id: the screen opens that checkpoint. */
  find?: string | undefined;
}

interface CheckpointSearch {
  /** undefined: the summary. */
  part?: Part | undefined;
  /** Of the tensors: only those whose names contain it. */
  filter?: string | undefined;
  /** The tensor whose shard map is shown, by its name. */
  tensor?: string | undefined;
}

interface CompareSearch {
  /** The id of the other checkpoint. */
  with?: string | undefined;
}

function text(value: unknown): string | undefined {
  // The router reads `?find=1200` as a number.
  const read = typeof value === "number" ? String(value) : value;
  return typeof read === "string" && read.trim() !== "" ? read.trim() : undefined;
}

export const finderRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/checkpoints",
  validateSearch: (search: Record<string, unknown>): FinderSearch => ({ find: text(search.find) }),
  component: lazyRouteComponent(() => import("./FinderScreen"), "FinderScreen"),
});

export const checkpointRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/checkpoints/$id",
  validateSearch: (search: Record<string, unknown>): CheckpointSearch => ({
    part: PARTS.find((each) => each !== "summary" && each === search.part),
    filter: text(search.filter),
    tensor: text(search.tensor),
  }),
  component: lazyRouteComponent(() => import("./CheckpointScreen"), "CheckpointScreen"),
});

export const compareRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/checkpoints/$id/compare",
  validateSearch: (search: Record<string, unknown>): CompareSearch => ({ with: text(search.with) }),
  component: lazyRouteComponent(() => import("./compare/CompareScreen"), "CompareScreen"),
});
