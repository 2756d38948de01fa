import type { Schemas } from "@/api/client";
import { type Facts, findAttention } from "./attention";

const NOW = Date.parse("2026-05-01T12:00:00Z");
const NONE: Facts = {
  ...{ runs: [], badCopies: [], hasAllBadCopies: true, badCheckpoints: [], badEvents: [], storeEvents: [], stores: [] },
  ...{ copies: [], hasAllCopies: true, drills: [], deletedRuns: new Set<string>() },
  ...{ scrub: undefined, project: undefined },
};
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

const checkpoint = (id: string, health: string) =>
  ({ id, health, project: "p", run: "a", step: 4, health_reason: null }) as Schemas["CheckpointView"];
const event = (type: string, data: object, timestamp = before(1)) =>
  ({ id: `1-${type}-${timestamp}`, type, timestamp, data }) as Schemas["EventView"];
/** A second store that lacks a run's newer states for some hours, with an objective of one hour. */
const behind = (name: string, hours: number, more: Partial<Schemas["RunCopies"]> = {}) =>
  ({
    ...{ run: name, store: "second", policy: true, error: null },
    ...{ rpo_objective_seconds: 3600, rpo_seconds: hours * 3600, ...more },
  }) as Schemas["RunCopies"];
const drill = (of: string, result: object | null, more: Partial<Schemas["OperationView"]> = {}) =>
  ({
    ...{ id: of, run: of, state: "done", arguments: { store: "second" }, result, error: null },
    ...{ created_at: before(1), ended_at: before(1), ...more },
  }) as Schemas["OperationView"];
const scrub = (more: Partial<Schemas["ControllerView"]>) =>
  ({ name: "scrub", lag_seconds: 90_000, paused_at: null, error: null, ...more }) as Schemas["ControllerView"];
const states = (facts: Partial<Facts>) => findAttention({ ...NONE, ...facts }, NOW).map((each) => each.state);

it("finds nothing in a quiet project", () => {
  expect(states({ runs: [run({})] })).toEqual([]);
});

it("puts lost data first, then stores, crash loops, stopped runs, runs without protection, objectives, and the quota", () => {
  const found = states({
    runs: [
      run({ name: "a", status: "failed" }),
      run({ name: "b", status: "stalled" }),
      run({ name: "c", restore_point: null }),
    ],
    badCopies: [{ lost: true, checkpoints: 4, bad_at: before(2) } as Schemas["BadCopy"]],
    storeEvents: [event("store.unavailable", { store: "second" })],
    badCheckpoints: [checkpoint("ck", "quarantined")],
    badEvents: [event("checkpoint.quarantined", { checkpoint_id: "ck" })],
    copies: [behind("a", 2)],
    drills: [drill("a", null, { state: "failed", error: "It is not whole there." })],
    scrub: scrub({}),
    project: { name: "p", quota_bytes: 100, quota_used_bytes: 90 } as Schemas["ProjectView"],
  });
  expect(found).toEqual([
    ...["corrupt", "unavailable", "quarantined", "stalled", "failed", "unprotected"],
    ...["RPO missed", "drill failed", "scrub late", "quota near"],
  ]);
});

it("leads to the screen where something can be done about it", () => {
  const found = findAttention(
    {
      ...NONE,
      runs: [run({ name: "b", status: "stalled" })],
      badCopies: [{ lost: true, checkpoints: 4 } as Schemas["BadCopy"]],
      stores: [{ role: "second", problem: "Access is denied." } as Schemas["StoreView"]],
      badCheckpoints: [
        checkpoint("ck_4", "corrupt"),
        {
          ...checkpoint("ck_3", "quarantined"),
          health_reason: "Attempts 2, 3, 4 crashed from step 3 without progress",
        },
      ],
      badEvents: [
        event("checkpoint.corrupt", { checkpoint_id: "ck_4" }),
        event("checkpoint.quarantined", { checkpoint_id: "ck_3" }, before(2)),
      ],
      copies: [behind("a", 2)],
      drills: [drill("a", { seconds: 90, rto_objective_seconds: 60 })],
      scrub: scrub({}),
      project: { name: "p", quota_bytes: 100, quota_used_bytes: 90 } as Schemas["ProjectView"],
    },
    NOW,
  );
  expect(found.map((each) => [each.state, each.to])).toEqual([
    ["corrupt", { screen: "storage", part: "bad" }],
    ["problem", { screen: "storage", part: "stores" }],
    ["corrupt", { screen: "checkpoint", id: "ck_4" }],
    ["crash loop", { screen: "run", run: "a" }],
    ["stalled", { screen: "run", run: "b" }],
    ["RPO missed", { screen: "storage", part: "second" }],
    ["RTO missed", { screen: "storage", part: "drills", run: "a" }],
    ["scrub late", { screen: "controller", name: "scrub" }],
    ["quota near", { screen: "usage" }],
  ]);
});

it("leaves a store alone that is back", () => {
  const events = [
    event("store.available", { store: "second" }),
    event("store.unavailable", { store: "second" }, before(2)),
  ];
  expect(states({ storeEvents: events })).toEqual([]);
});

it("compares the quota with what counts against it, not with the bytes of all stores", () => {
  const project = { name: "p", quota_bytes: 100, quota_used_bytes: 45, stored_bytes: 95 } as Schemas["ProjectView"];
  expect(states({ project })).toEqual([]);
});

it("tells the quotas but that of bytes, and no soft one", () => {
  const quotas = [
    { kind: "bytes", hard: 100, soft: null, used: 99 },
    { kind: "objects", hard: null, soft: 10, used: 20 },
    { kind: "runs", hard: 10, soft: null, used: 9 },
    { kind: "checkpoints", hard: 10, soft: null, used: 10 },
    { kind: "rows", hard: 10, soft: null, used: 9 },
  ];
  const project = { name: "p", quota_bytes: null, quotas } as Schemas["ProjectView"];
  const found = findAttention({ ...NONE, project }, NOW).map((each) => [each.key, each.state]);
  expect(found).toEqual([
    ["quota of runs", "quota near"],
    ["quota of checkpoints", "quota reached"],
    ["quota of rows", "quota near"],
  ]);
});

it("counts chunks, and beside them the copies that are bad", () => {
  const copy = (digest: string, store: string) =>
    ({ digest, bytes: 8, store, lost: true, checkpoints: 1, bad_at: before(1) }) as Schemas["BadCopy"];
  const badCopies = [copy("aa", "primary"), copy("aa", "second"), copy("bb", "primary")];
  const detail = (isWhole: boolean) =>
    findAttention({ ...NONE, badCopies, hasAllBadCopies: isWhole }, NOW).map((each) => each.detail)[0];
  expect(detail(true)).toMatch(/^2 chunks \(3 bad copies\) without/);
  expect(detail(false)).toMatch(/^At least 2 chunks/);
});

it("tells a corrupt checkpoint once and for as long as it is corrupt, a quarantined one while it is news", () => {
  const about = (type: string, checkpoint_id: string, hours: number) => event(type, { checkpoint_id }, before(hours));
  const found = findAttention(
    {
      ...NONE,
      badCheckpoints: [
        checkpoint("old", "corrupt"),
        checkpoint("new", "corrupt"),
        checkpoint("quarantined long ago", "quarantined"),
      ],
      badEvents: [
        about("checkpoint.corrupt", "new", 1),
        about("checkpoint.corrupt", "new", 3),
        about("checkpoint.corrupt", "repaired", 4),
        about("checkpoint.quarantined", "quarantined long ago", 24 * 8),
      ],
    },
    NOW,
  );
  expect(found.map((each) => [each.key, each.since])).toEqual([
    ["checkpoint new", before(1)],
    ["checkpoint old", null],
  ]);
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
  expect(states({ runs: [run({ ...nothing, created_at: before(1.5) })] })).toEqual([]);
  expect(states({ runs: [run({ ...nothing, created_at: before(2) })] })).toEqual(["unprotected"]);
});

it("forgets what failed long ago, and not what is stalled", () => {
  expect(states({ runs: [run({ status: "stalled", last_heard_at: before(24 * 8) })] })).toEqual(["stalled"]);
  expect(states({ runs: [run({ status: "failed", last_heard_at: before(24 * 8) })] })).toEqual([]);
});

it("leaves bad copies to the repair while another copy is good", () => {
  expect(states({ badCopies: [{ lost: false, checkpoints: 4 } as Schemas["BadCopy"]] })).toEqual([]);
});

it("tells all runs that the second store is too far behind with by the worst, and why it is", () => {
  const detail = (...copies: Schemas["RunCopies"][]) =>
    findAttention({ ...NONE, copies }, NOW).map((each) => each.detail);
  expect(detail()).toEqual([]);
  const [two] = detail(behind("a", 2), behind("b", 3, { error: "Access is denied." }));
  expect(two).toMatch(/^2 runs with states .*; the worst is b: 3 h of 1 h. The last try failed: Access is denied.$/);
  expect(detail(behind("a", 2, { policy: false }))[0]).toMatch(/^1 run .*No policy asks for copies of it.$/);
  expect(detail(behind("a", 2, { store: null }))[0]).toMatch(/The service has no second store.$/);
  expect(findAttention({ ...NONE, copies: [behind("a", 2)], hasAllCopies: false }, NOW)[0]?.detail).toMatch(
    /^At least 1 run /,
  );
});

it("tells the last drill of each run from each store, if it failed or has missed an objective of its day", () => {
  const slow = { seconds: 7200, rto_objective_seconds: 3600, rpo_seconds: 600, rpo_objective_seconds: 300 };
  const good = { seconds: 60, rto_objective_seconds: 3600, rpo_seconds: 0, rpo_objective_seconds: 300 };
  const found = findAttention(
    {
      ...NONE,
      drills: [
        drill("going", null, { state: "running", ended_at: null }),
        drill("a", slow),
        drill("a", good, { arguments: { store: "primary" } }),
        drill("mended", good),
        drill("mended", null, { state: "failed", error: "It is not whole there." }),
        drill("cancelled", null, { state: "cancelled" }),
        drill("cancelled", null, { state: "failed", error: "It is not whole there." }),
        drill("no objective", { seconds: 7200, rto_objective_seconds: null }),
        drill("long ago", slow, { created_at: before(24 * 31), ended_at: before(24 * 31) }),
        drill("deleted", slow),
      ],
      deletedRuns: new Set(["deleted"]),
    },
    NOW,
  );
  expect(found.map((each) => [each.state, each.subject, each.detail])).toEqual([
    ["RTO, RPO missed", "Drill of a", "From the second store alone: 2 h of 1 h (RTO), 10 min of 5 min (RPO)."],
    ["drill failed", "Drill of cancelled", "From the second store alone: It is not whole there."],
  ]);
});

it("tells a scrub that is late by a day, and why", () => {
  expect(states({ scrub: scrub({ lag_seconds: 86_400 }) })).toEqual([]);
  expect(states({ scrub: scrub({ lag_seconds: null }) })).toEqual([]);
  const detail = (more: Partial<Schemas["ControllerView"]>) =>
    findAttention({ ...NONE, scrub: scrub(more) }, NOW).map((each) => each.detail)[0];
  expect(detail({})).toBe(
    "The oldest copy should have been read again 1 d 1 h ago. If it is too slow, raise HOLDFAST_SCRUB_BYTES_PER_SECOND.",
  );
  expect(detail({ error: "The mount is gone." })).toMatch(/Its last error: The mount is gone.$/);
  expect(detail({ paused_at: before(9), pause_reason: "a rebuild" })).toMatch(/It is paused: a rebuild$/);
});
