import { createRoute, lazyRouteComponent } from "@tanstack/react-router";
import type { Schemas } from "@/api/client";
import { frameRoute } from "@/app/frame_route";
import { type RunFilter, readRunFilter } from "./prune/runFilter";
import type { PolicyDocument } from "./rules";

export const VIEWS = ["policy", "prune", "trash", "usage"] as const;
export type View = (typeof VIEWS)[number];

/** Policies beside that of retention. */
export type OtherKind = Exclude<Schemas["PolicyKind"], "retention">;

/** Each once; one that is missing is an error of the compiler. */
const EACH_KIND: Record<OtherKind, true> = { copies: true, tiers: true, objectives: true };
export const OTHER_KINDS = Object.keys(EACH_KIND) as OtherKind[];

/** Which checkpoints of a plan are listed. */
export const SHOWN = ["all", "expire", "keep"] as const;
export type Shown = (typeof SHOWN)[number];

export interface RetentionSearch {
  /** Without one: the policy. */
  view?: View | undefined;
  /** Without one: the whole project. */
  run?: string | undefined;
  /** Of the policy that is shown. Without one: retention. */
  kind?: OtherKind | undefined;
  /** An edited policy that is not saved. */
  draft?: PolicyDocument | undefined;
  /** What held when the draft was begun: `editionOf`. */
  begun?: string | undefined;
  show?: Shown | undefined;
  /** Of a project's policy: the run whose checkpoints are listed. */
  listed?: string | undefined;
  /** What a prune would take. Without one nothing was asked for yet. */
  filter?: Schemas["PruneFilter"] | undefined;
  /** Prune the last healthy points, too. */
  allOfRun?: true | undefined;
  /** In which runs of the project. Without one: in all. */
  runs?: RunFilter | undefined;
}

/** What was said of one run: another one begins without it. */
export const OF_THE_RUN = {
  draft: undefined,
  begun: undefined,
  listed: undefined,
  filter: undefined,
  allOfRun: undefined,
  runs: undefined,
};

function text(value: unknown): string | undefined {
  // The router reads a name of digits as a number.
  return typeof value === "string" || typeof value === "number" ? String(value) || undefined : undefined;
}

function object<Value extends object>(value: unknown): Value | undefined {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Value) : undefined;
}

export const retentionRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/retention",
  validateSearch: (search: Record<string, unknown>): RetentionSearch => ({
    view: VIEWS.find((each) => each === search.view),
    run: text(search.run),
    kind: OTHER_KINDS.find((each) => each === search.kind),
    draft: object(search.draft),
    begun: text(search.begun),
    show: SHOWN.find((each) => each === search.show),
    listed: text(search.listed),
    filter: object(search.filter),
    allOfRun: search.allOfRun === true || undefined,
    runs: readRunFilter(search.runs),
  }),
  component: lazyRouteComponent(() => import("./RetentionScreen"), "RetentionScreen"),
});
