import { attempt, checkpoint } from "../examples";
import { branchesOf, curveOf, metricNames } from "../metrics";
import { findLineage, isOnLineage, makeLanes, marksOf, stepsOf, ticksOf } from "./lanes";

// 1 ran to 300 and crashed; 2 went on from 200 to 500 and was rolled back; 3 went on from 350 and trains.
const ATTEMPTS = [
  attempt(3, { resumed_from: "ck-2-350", last_step: 400 }),
  attempt(2, { resumed_from: "ck-1-200", last_step: 500, outcome: "fenced", rolled_back_at: "2026-01-01T02:00:00Z" }),
  attempt(1, { last_step: 300, outcome: "failed" }),
];
const CHECKPOINTS = [
  checkpoint(2, 500, { health: "diverged", metrics: { loss: { nonfinite: "nan" } } }),
  checkpoint(3, 400, { metrics: { loss: { value: 1 }, accuracy: { value: 0.5 } } }),
  checkpoint(2, 400, { metrics: { loss: { value: 2 } } }),
  checkpoint(2, 350, { metrics: { loss: { value: 3 } } }),
  checkpoint(1, 300, { state: "aborted", committed_at: null }),
  checkpoint(1, 200, { metrics: { loss: { value: 4 } } }),
];
const POINTS = new Map(CHECKPOINTS.map((each) => [each.id, each]));
const LINEAGE = findLineage(ATTEMPTS, POINTS);

it("follows the lineage from the newest attempt back by what each resumed from", () => {
  expect([...LINEAGE]).toEqual([
    [3, null],
    [2, 350],
    [1, 200],
  ]);
  expect(CHECKPOINTS.filter((each) => isOnLineage(LINEAGE, each)).map((each) => each.id)).toEqual([
    "ck-3-400",
    "ck-2-350",
    "ck-1-200",
  ]);
});

it("leaves an attempt out that never ran, and ends at a checkpoint that is not known", () => {
  const unheard = attempt(4, { last_step: null });
  expect([...findLineage([unheard, ...ATTEMPTS], POINTS).keys()]).toEqual([3, 2, 1]);
  expect([...findLineage(ATTEMPTS, new Map())]).toEqual([[3, null]]);
});

it("makes a lane of each attempt, with the steps that are kept and those that are lost", () => {
  const lanes = makeLanes(ATTEMPTS, CHECKPOINTS, POINTS, new Map());
  expect(lanes.map(({ attempt: { number }, base, keptTo, last }) => [number, base, keptTo, last])).toEqual([
    [3, 350, 400, 400],
    [2, 200, 350, 500],
    [1, 0, 200, 300],
  ]);
  expect(lanes[1]?.checkpoints.map((each) => each.step)).toEqual([500, 400, 350]);
});

it("begins a lane where goodput says so, if the checkpoint is not known any more", () => {
  const [lane] = makeLanes([attempt(9, { resumed_from: "gone", last_step: 90 })], [], new Map(), new Map([[9, 70]]));
  expect([lane?.base, lane?.parent]).toEqual([70, null]);
});

it("shows the steps that were asked for, else all, and never an empty axis", () => {
  const lanes = makeLanes(ATTEMPTS, CHECKPOINTS, POINTS, new Map());
  expect(stepsOf(lanes)).toEqual([0, 500]);
  expect(stepsOf(lanes, 100, 200)).toEqual([100, 200]);
  expect(stepsOf([], undefined, undefined)).toEqual([0, 1]);
  expect(stepsOf(lanes, 700)).toEqual([700, 701]);
});

it("draws one mark for checkpoints on the same spot, and the restore point by itself, over the others", () => {
  const many = Array.from({ length: 10_000 }, (_, step) => checkpoint(1, step));
  const marks = marksOf(many, 100, "ck-1-9999");
  expect(marks).toHaveLength(101);
  expect(marks.at(-1)).toMatchObject({ kind: "restore-point", from: 9999, to: 9999 });
  expect(marks[0]).toMatchObject({ kind: "committed", from: 0, to: 99 });
});

it("tells what became of a checkpoint by its mark", () => {
  const marks = marksOf([...CHECKPOINTS, checkpoint(3, 410, { state: "uploading" })], 1, undefined);
  expect(new Set(marks.map((each) => each.kind))).toEqual(new Set(["aborted", "uploading", "committed", "unhealthy"]));
  expect(marksOf([checkpoint(1, 1, { state: "trashed" })], 1, undefined)[0]?.kind).toBe("deleted");
});

it("rules an axis at round steps", () => {
  expect(ticksOf([0, 500], 5)).toEqual([0, 100, 200, 300, 400, 500]);
  expect(ticksOf([7, 9], 10)).toEqual([7, 8, 9]);
});

it("draws a metric along the lineage, and what an attempt lost as a line of its own", () => {
  expect(metricNames(CHECKPOINTS)).toEqual(["loss", "accuracy"]);
  const { x, series } = curveOf(CHECKPOINTS, "loss", LINEAGE);
  expect(x).toEqual([200, 350, 400, 500]);
  expect(series.map(({ label, values }) => [label, values])).toEqual([
    ["loss", [4, 3, 1, undefined]],
    ["loss, attempt 2, not on the lineage", [undefined, undefined, 2, null]],
  ]);
});

it("draws what was measured as a line through the checkpoints, these as dots, and what an attempt lost", () => {
  expect(metricNames(CHECKPOINTS, ["grad_norm", "train_loss"])).toEqual([
    "loss",
    "train_loss",
    "accuracy",
    "grad_norm",
  ]);
  const points = [
    { step: 300, value: 3.5 },
    { step: 350, value: 3 },
    { step: 351, value: null, nonfinite: "inf" as const },
    { step: 352, value: null, nonfinite: "nan" as const },
    { step: 1400, value: 1 },
  ];
  const { x, series, words } = curveOf(CHECKPOINTS, "loss", LINEAGE, points);
  const none = undefined;
  expect(x).toEqual([200, 300, 350, 351, 352, 400, 500, 1400]);
  expect(series.map(({ label, values, dots }) => [label, values, dots])).toEqual([
    // Of 200 and 400 nothing was measured: the line goes through what the checkpoints carry.
    ["loss", [4, 3.5, 3, null, null, 1, none, 1], none],
    ["loss of checkpoints", [4, none, 3, none, none, 1, none, none], true],
    ["loss, attempt 2, not on the lineage", [none, none, none, none, none, 2, null, none], none],
  ]);
  expect(words).toBe("Least 1 at step 1,400, greatest 4 at step 200. Not finite: inf at step 351, nan at step 352.");
  expect(curveOf([], "loss", LINEAGE, [])).toEqual({ x: [], series: [], words: "" });
});

it("draws what was measured on a branch that the run has left, and its checkpoints if nothing was", () => {
  const left = new Map([
    [2, [{ step: 351, value: 2.9 }]],
    [1, [{ step: 201, value: 3.9 }]],
  ]);
  const drawn = (measured: typeof left) =>
    curveOf(CHECKPOINTS, "loss", LINEAGE, [{ step: 350, value: 3 }], measured).series.map(({ label }) => label);
  const { x, series } = curveOf(CHECKPOINTS, "loss", LINEAGE, [{ step: 350, value: 3 }], left);
  expect(x).toEqual([200, 201, 350, 351, 400, 500]);
  expect(series.slice(2).map(({ label, values }) => [label, values.map((each) => each ?? 0)])).toEqual([
    ["loss, attempt 2, not on the lineage", [0, 0, 0, 2.9, 2, 0]],
    ["loss, attempt 1, not on the lineage", [0, 3.9, 0, 0, 0, 0]],
  ]);
  expect(new Set(series.map(({ color }) => color)).size).toBe(3);
  expect(drawn(new Map([[2, []]]))).toContain("loss, attempt 2, not on the lineage");
});

it("finds the newest attempts with steps that the run has left, and where each was left", () => {
  const lineage = [
    { attempt: 3, max_step: null },
    { attempt: 2, max_step: 350 },
    { attempt: 1, max_step: 300 },
  ];
  // 1 was left at its last step, and 4 has not run yet.
  expect(branchesOf([attempt(4, { last_step: null }), ...ATTEMPTS], lineage)).toEqual([{ attempt: 2, from: 351 }]);
  const off = Array.from({ length: 6 }, (_, at) => attempt(at + 1, { last_step: 9 }));
  expect(branchesOf(off, []).map((each) => [each.attempt, each.from])).toEqual([
    [6, 0],
    [5, 0],
    [4, 0],
    [3, 0],
  ]);
});

it("counts the values that are not finite, if they are many", () => {
  const points = [9, 8, 7, 6, 5].map((step) => ({ step, value: null, nonfinite: "nan" as const }));
  const { words } = curveOf([], "loss", LINEAGE, points);
  expect(words).toBe("Not finite: nan at step 5, nan at step 6, nan at step 7 and 2 more.");
});
