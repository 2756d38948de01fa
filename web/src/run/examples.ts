import type { Schemas } from "@/api/client";
import { SESSION } from "@/testing/page";

/** An attempt and a checkpoint as the service tells of them; for tests. */

export function attempt(number: number, more: Partial<Schemas["AttemptView"]> = {}): Schemas["AttemptView"] {
  return {
    number,
    launch_id: `launch-${number}`,
    host: "node-1",
    world_size: 2,
    environment: {},
    opened_at: "2026-01-01T00:00:00Z",
    heartbeat_at: null,
    ended_at: null,
    outcome: null,
    outcome_detail: null,
    resumed_from: null,
    last_step: null,
    ...more,
  };
}

export function checkpoint(
  number: number,
  step: number,
  more: Partial<Schemas["CheckpointView"]> = {},
): Schemas["CheckpointView"] {
  return {
    id: `ck-${number}-${step}`,
    project: "demo",
    run: "llama",
    attempt: number,
    step,
    state: "committed",
    health: "ok",
    health_reason: null,
    kind: "periodic",
    tier: "hot",
    created_at: "2026-01-01T01:00:00Z",
    committed_at: "2026-01-01T01:00:05Z",
    aborted_at: null,
    abort_rank: null,
    abort_reason: null,
    components: {},
    labels: [],
    metrics: {},
    missing_ranks: [],
    sealed_ranks: 2,
    world_size: 2,
    digest: "d",
    etag: "e",
    detached: false,
    logical_bytes: 2048,
    chunk_bytes: 2048,
    uploaded_bytes: 1024,
    deduplicated_bytes: 0,
    ...more,
  };
}

export const RUN = "/v1/projects/demo/runs/llama";
export const page = (...items: unknown[]) => ({ items, next_cursor: null });
const CHECKPOINTS = [
  checkpoint(2, 300, { health: "diverged", health_reason: "loss is NaN" }),
  checkpoint(2, 200, { metrics: { loss: { value: 1.5 } }, labels: ["best"] }),
  checkpoint(1, 100, { metrics: { loss: { value: 2.5 } } }),
];
export const ATTEMPTS = [
  attempt(2, {
    ...{ resumed_from: "ck-1-100", last_step: 300, environment: { cuda: "12.6" } },
    skipped: [{ checkpoint_id: "ck-1-150", step: 150, attempt: 1, reason: "aborted", detail: "Not all ranks sealed." }],
  }),
  attempt(1, {
    last_step: 150,
    outcome: "failed",
    outcome_detail: "ECC error",
    error_rank: 3,
    environment: { cuda: "12.4" },
  }),
];
/** What the service says of these metrics: values by step. */
const measured = (curves: Record<string, Record<number, number | "nan">>) => ({
  attempt: null,
  segments: [
    { attempt: 2, max_step: null },
    { attempt: 1, max_step: 100 },
  ],
  names: Object.keys(curves),
  metrics: Object.entries(curves).map(([name, values]) => ({
    name,
    points: Object.entries(values).map(([step, value]) => ({
      step: Number(step),
      attempt: 2,
      ...(value === "nan" ? { value: null, nonfinite: value } : { value, nonfinite: null }),
    })),
  })),
});
type Curves = Parameters<typeof measured>[0];
/** An answer: these along the lineage, and what the attempt that it is asked for has left behind. */
export const history =
  (curves: Curves, left: Curves = {}) =>
  (request: Request) =>
    measured(new URL(request.url).searchParams.has("attempt") ? left : curves);
const SPENT = {
  wall_seconds: 100,
  productive_seconds: 80,
  lost_seconds: 10,
  saving_seconds: 5,
  restoring_seconds: 3,
  restarting_seconds: 2,
  idle_seconds: 0,
  steps_run: 350,
  steps_kept: 300,
  steps_lost: 50,
};
const POINT = {
  checkpoint_id: "ck-2-200",
  step: 200,
  attempt: 2,
  world_size: 2,
  logical_bytes: 2048,
  digest: "d",
};
/** What the service answers about the run, by call. */
export const ANSWERS = {
  "GET /v1/sessions/current": () => SESSION,
  "GET /v1/projects": () => page({ id: "1", name: "demo", created_at: "2026-01-01T00:00:00Z" }),
  [`GET ${RUN}`]: () => ({
    id: "r",
    project: "demo",
    name: "llama",
    created_at: "2026-01-01T00:00:00Z",
    latest_attempt: 2,
    status: "training",
    committed_checkpoints: 3,
    last_step: 300,
  }),
  [`GET ${RUN}/attempts`]: () => page(...ATTEMPTS),
  [`GET ${RUN}/attempts/1`]: () => ATTEMPTS[1],
  [`GET ${RUN}/attempts/2`]: () => ATTEMPTS[0],
  [`GET ${RUN}/attempts/2/config`]: (request: Request) => {
    // Without a choice the service takes the newest one before that gave a configuration.
    const against = Number(new URL(request.url).searchParams.get("against") ?? 1);
    const differences = [{ path: "optimizer.lr", before: 0.1, after: 0.01, change: "changed" }];
    const config = { optimizer: { lr: 0.01 } };
    return { attempt: 2, config, compared_with: against, differences, differences_left_out: 0 };
  },
  [`GET ${RUN}/checkpoints`]: (request: Request) => {
    const health = new URL(request.url).searchParams.get("health");
    return page(...CHECKPOINTS.filter((each) => health === null || each.health === health));
  },
  [`GET ${RUN}/metrics-history`]: () => measured({}),
  [`GET ${RUN}/goodput`]: () => ({
    ...SPENT,
    goodput: 0.8,
    since: null,
    until: null,
    attempts: [
      { ...SPENT, attempt: 1, outcome: "failed", last_step: 150, resumed_from_step: null, step_seconds: 0.2 },
      { ...SPENT, attempt: 2, outcome: null, last_step: 300, resumed_from_step: 100, step_seconds: 0.2, steps_lost: 0 },
    ],
  }),
  [`GET ${RUN}/restore-point`]: () => ({
    restore_point: { ...POINT, committed_at: "2026-01-01T01:00:00Z" },
    skipped: [{ checkpoint_id: "ck-2-300", step: 300, attempt: 2, reason: "diverged", detail: "loss is NaN" }],
    ever_committed: true,
    note: "",
  }),
  [`GET ${RUN}/samples`]: () => page(),
  [`GET ${RUN}/advice`]: () => ({
    interval_seconds: 600,
    steps: 120,
    reasons: ["Two interruptions in a day."],
    outlook: [{ interval_seconds: 600, lost_share: 0.01 }],
  }),
};

export const IN_TRASH = {
  ...{ deleted_by: "ops", reason: "a failed idea", deleted_at: "2026-01-02T00:00:00Z" },
  purge_at: "2999-01-05T00:00:00Z",
};
