import type { Schemas } from "@/api/client";

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
