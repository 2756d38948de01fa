import { createRoute, lazyRouteComponent } from "@tanstack/react-router";
import type { Schemas } from "@/api/client";
import { frameRoute } from "@/app/frame_route";
import { readMoment } from "@/format/moments";

export type CheckpointState = Schemas["CheckpointState"];
export type Health = Schemas["Health"];

/** Each word once; one that is missing is an error of the compiler. */
const STATES: Record<CheckpointState, true> = {
  committed: true,
  uploading: true,
  aborted: true,
  trashed: true,
  deleting: true,
  deleted: true,
};
const HEALTHS: Record<Health, true> = { ok: true, diverged: true, corrupt: true, quarantined: true };
export const CHECKPOINT_STATES = Object.keys(STATES) as CheckpointState[];
export const CHECKPOINT_HEALTHS = Object.keys(HEALTHS) as Health[];

export interface RunSearch {
  /** The metric whose curve is drawn. */
  metric?: string | undefined;
  /** The steps that the timeline and the list show, both ends included. */
  from?: number | undefined;
  to?: number | undefined;
  /** The attempts that are compared. */
  before?: number | undefined;
  after?: number | undefined;
  /** Of the list of checkpoints. */
  state?: CheckpointState | undefined;
  health?: Health | undefined;
  label?: string | undefined;
  /** When they were committed: from this moment on, and before this one. */
  since?: string | undefined;
  until?: string | undefined;
}

/** The run of the project in the address: `/runs/llama?project=demo`. */
export const runRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/runs/$run",
  validateSearch: (search: Record<string, unknown>): RunSearch => ({
    metric: text(search.metric),
    from: whole(search.from, 0),
    to: whole(search.to, 0),
    before: whole(search.before, 1),
    after: whole(search.after, 1),
    state: CHECKPOINT_STATES.find((each) => each === search.state),
    health: CHECKPOINT_HEALTHS.find((each) => each === search.health),
    label: text(search.label),
    since: moment(search.since),
    until: moment(search.until),
  }),
  component: lazyRouteComponent(() => import("./RunScreen"), "RunScreen"),
});

/** A router reads `label=7` as a number. */
function text(value: unknown): string | undefined {
  return typeof value === "string" || typeof value === "number" ? String(value) || undefined : undefined;
}

function moment(value: unknown): string | undefined {
  return readMoment(text(value) ?? "");
}

function whole(value: unknown, least: number): number | undefined {
  return Number.isSafeInteger(value) && (value as number) >= least ? (value as number) : undefined;
}
