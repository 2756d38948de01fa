import type { Schemas } from "@/api/client";
import { type Facts, findAttention } from "./attention";

const NOW = Date.parse("2026-05-01T12:00:00Z");
const NONE: Facts = {
  ...{ runs: [], badCopies: [], hasAllBadCopies: true, badCheckpoints: [], badEvents: [], storeEvents: [], stores: [] },
  project: undefined,
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
    storeEvents: [event("store.unavailable", { store: "second" })],
    badCheckpoints: [checkpoint("ck", "quarantined")],
    badEvents: [event("checkpoint.quarantined", { checkpoint_id: "ck" })],
    project: { name: "p", quota_bytes: 100, quota_used_bytes: 90 } as Schemas["ProjectView"],
  });
  expect(found).toEqual(["corrupt", "unavailable", "quarantined", "stalled", "failed", "unprotected", "quota near"]);
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
      project: { name: "p", quota_bytes: 100, quota_used_bytes: 90 } as Schemas["ProjectView"],
    },
    NOW,
  );
  expect(found.map((each) => [each.state, each.to])).toEqual([
    ["corrupt", { screen: "storage" }],
    ["problem", { screen: "storage" }],
    ["corrupt", { screen: "checkpoint", id: "ck_4" }],
    ["crash loop", { screen: "run", run: "a" }],
    ["stalled", { screen: "run", run: "b" }],
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
