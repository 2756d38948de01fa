import type { Schemas } from "@/api/client";
import { type Facts, findAttention } from "./attention";

const NOW = Date.parse("2026-05-01T12:00:00Z");
const NONE: Facts = { runs: [], badCopies: [], events: [], stores: [], project: undefined };
const before = (hours: number) => new Date(NOW - hours * 3_600_000).toISOString();

function run(more: Partial<Schemas["RunView"]>): Schemas["RunView"] {
  return {
    id: more.name ?? "r",
    project: "p",
    name: "r",
    created_at: before(24),
    latest_attempt: 1,
    status: "training",
    last_heard_at: before(0),
    committed_checkpoints: 3,
    newest_step: 30,
    logical_bytes: 0,
    deduplicated_bytes: 0,
    restore_point: point(before(0.1)),
    ...more,
  } as Schemas["RunView"];
}

function point(committed_at: string): Schemas["RestorePoint"] {
  return { checkpoint_id: "ck", step: 30, attempt: 1, world_size: 1, digest: "d", logical_bytes: 0, committed_at };
}

const event = (type: string, data: object, timestamp = before(1)) =>
  ({ id: `1-${type}-${timestamp}`, type, timestamp, data }) as Schemas["EventView"];
const states = (facts: Partial<Facts>) => findAttention({ ...NONE, ...facts }, NOW).map((each) => each.state);

it("finds nothing in a quiet project", () => {
  expect(states({ runs: [run({})] })).toEqual([]);
});

it("puts lost data first, then stores, crash loops, stopped runs, runs without protection, and the quota", () => {
  const found = states({
    runs: [
      run({ name: "a", status: "failed" }),
      run({ name: "b", status: "stalled" }),
      run({ name: "c", restore_point: null }),
    ],
    badCopies: [{ lost: true, checkpoints: 4, bad_at: before(2) } as Schemas["BadCopy"]],
    events: [event("store.unavailable", { store: "second" }), event("checkpoint.quarantined", { run: "a", step: 4 })],
    project: { name: "p", quota_bytes: 100, stored_bytes: 90 } as Schemas["ProjectView"],
  });
  expect(found).toEqual(["corrupt", "unavailable", "quarantined", "stalled", "failed", "unprotected", "quota near"]);
});

it("leaves a store alone that is back", () => {
  const events = [
    event("store.available", { store: "second" }),
    event("store.unavailable", { store: "second" }, before(2)),
  ];
  expect(states({ events })).toEqual([]);
});

it("tells a live run whose restore point is old, and not one that has finished", () => {
  const restore_point = point(before(5));
  const found = findAttention(
    { ...NONE, runs: [run({ restore_point }), run({ status: "finished", restore_point })] },
    NOW,
  );
  expect(found.map((each) => each.detail)).toEqual(["It trains, and its restore point, step 30, is 5 h old."]);
});

it("gives a new run time for its first checkpoint", () => {
  const nothing = { restore_point: null, committed_checkpoints: 0 };
  expect(states({ runs: [run({ ...nothing, created_at: before(0.5) })] })).toEqual([]);
  expect(states({ runs: [run({ ...nothing, created_at: before(2) })] })).toEqual(["unprotected"]);
});

it("forgets what failed long ago", () => {
  expect(states({ runs: [run({ status: "failed", last_heard_at: before(24 * 8) })] })).toEqual([]);
});

it("leaves bad copies to the repair while another copy is good", () => {
  expect(states({ badCopies: [{ lost: false, checkpoints: 4 } as Schemas["BadCopy"]] })).toEqual([]);
});
