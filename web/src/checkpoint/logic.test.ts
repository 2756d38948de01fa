import type { Schemas } from "@/api/client";
import { matchShards, matchTensors } from "./compare/compare";
import { groupCopies } from "./copies/copies";
import { changedBy, isOfHealth } from "./history/history";
import { formatMetric, readMetric } from "./metric";
import { readTarget } from "./selector";
import { boxesOf, CannotRead, cutAxes, itemBytes, placement, readLayout } from "./tensors/layout";

describe("what a reader types", () => {
  it("reads a selector of a run, the run alone, and an id", () => {
    const best = { project: "demo", run: "gpt", selector: "best:loss:min" };
    expect(readTarget(" demo/gpt@best:loss:min ")).toEqual(best);
    expect(readTarget("demo/gpt@1200#3")).toEqual({ project: "demo", run: "gpt", selector: "1200#3" });
    expect(readTarget("demo/gpt")).toEqual({ project: "demo", run: "gpt", selector: "latest" });
    const id = `ck_${"0a".repeat(16)}`;
    expect(readTarget(id)).toEqual({ id });
  });

  it("takes a selector alone as one of the run that is open", () => {
    const near = { project: "demo", run: "gpt" };
    expect(readTarget("1200", near)).toEqual({ ...near, selector: "1200" });
    expect(readTarget("@best:loss", near)).toEqual({ ...near, selector: "best:loss" });
  });

  it.each(["", "gpt", "1200", "demo/gpt@", "a/b/c@latest", "/gpt@latest"])(
    "says what to type in place of “%s”",
    (text) => {
      expect(() => readTarget(text)).toThrow(/project\/run@selector/);
    },
  );

  it("reads numbers and what is none of a metric", () => {
    expect(readMetric("1e-3")).toEqual({ value: 0.001 });
    expect(readMetric("NaN")).toEqual({ nonfinite: "nan" });
    expect(() => readMetric("0,25")).toThrow("no number");
    expect(() => readMetric(" ")).toThrow("no number");
    expect(formatMetric({ nonfinite: "-inf" })).toBe("-inf");
  });
});

const piece = (position: number, offsets: number[], shape: number[], ordinal: number) => [
  position,
  offsets,
  shape,
  [[ordinal, 0, 4]],
];
const DOCUMENT = {
  format: "holdfast-layout-1",
  world_size: 2,
  tensors: {
    w: { component: "model", dtype: "float32", shape: [4, 2], replicated: false },
    b: { component: "model", dtype: "bfloat16", shape: [2], replicated: true },
    tied: { component: "model", dtype: "float32", shape: [4, 2], replicated: false, alias_of: "w" },
  },
  // Positions are those of the sorted names: b, tied, w.
  shards: [
    { chunks: [8, 8], pieces: [piece(0, [0], [2], 0), piece(2, [0, 0], [2, 2], 1)] },
    { chunks: [8], pieces: [piece(2, [2, 0], [2, 2], 0)] },
  ],
};

describe("the layout", () => {
  const { tensors, worldSize } = readLayout(JSON.stringify(DOCUMENT));
  const of = (name: string) => tensors.find((each) => each.name === name) ?? expect.fail(name);

  it("says which rank holds which part of which tensor", () => {
    expect(worldSize).toBe(2);
    expect(of("w").pieces.map(({ rank, offsets }) => [rank, offsets])).toEqual([
      [0, [0, 0]],
      [1, [2, 0]],
    ]);
    expect(cutAxes(of("w"))).toEqual([0]);
    expect(tensors.map((each) => `${each.name}: ${placement(each)}`)).toEqual([
      "b: rank 0",
      "tied: tied to w",
      "w: cut in 2, on 2 ranks",
    ]);
    expect(of("w").bytes).toBe(32);
    expect(of("b").bytes).toBe(4);
  });

  it("counts a box that several ranks store once", () => {
    const again = { ...of("b"), pieces: [...of("b").pieces, { rank: 1, offsets: [0], shape: [2], segments: [] }] };
    expect(boxesOf(again)).toEqual([{ offsets: [0], shape: [2], ranks: [0, 1] }]);
  });

  it("knows the bytes of torch's dtypes", () => {
    const names = ["bool", "uint8", "float8_e4m3fn", "float4_e2m1fn_x2", "bfloat16", "complex32", "complex128"];
    expect(names.map(itemBytes)).toEqual([1, 1, 1, 1, 2, 4, 16]);
    expect(itemBytes("quaternion")).toBeNull();
  });

  it("refuses a document of another format", () => {
    expect(() => readLayout(JSON.stringify({ ...DOCUMENT, format: "holdfast-layout-9" }))).toThrow(CannotRead);
  });
});

describe("comparing", () => {
  it("matches shards by rank and digest", () => {
    const shard = (rank: number, digest: string | null) => ({ rank, digest }) as Schemas["ShardView"];
    const found = matchShards(
      [shard(0, "a"), shard(1, "b"), shard(2, null)],
      [shard(0, "a"), shard(1, "c"), shard(2, null)],
    );
    expect(found.map((match) => match.isSame)).toEqual([true, false, false]);
  });

  it("tells tensors whose chunks are the same, and never guesses", () => {
    const layout = readLayout(JSON.stringify(DOCUMENT));
    const lists = (first: string[], second: string[]) =>
      new Map([
        [0, first],
        [1, second],
      ]);
    const verdicts = (others: Map<number, string[]>, other = layout) =>
      matchTensors(layout, lists(["x", "y"], ["z"]), other, others).map(({ name, verdict }) => `${name} ${verdict}`);
    expect(verdicts(lists(["x", "y"], ["changed"]))).toEqual(["b same", "tied same", "w differs"]);
    expect(verdicts(lists(["x"], []))).toEqual(["b same", "tied same", "w unknown"]);
    const { b, ...fewer } = DOCUMENT.tensors;
    const other = readLayout(JSON.stringify({ ...DOCUMENT, tensors: { ...fewer, c: { ...b, dtype: "float32" } } }));
    expect(verdicts(lists(["x", "y"], ["z"]), other)[0]).toBe("b removed");
  });
});

it("groups copies by store and proof, what is bad first, and keeps the oldest proof", () => {
  const copy = (change: Partial<Schemas["CopyView"]>): Schemas["CopyView"] => ({
    store: "primary",
    state: "verified",
    proof: "read",
    codec: "raw",
    storage_class: null,
    stored_bytes: 10,
    verified_at: "2026-01-02T00:00:00Z",
    bad_at: null,
    finding: null,
    repaired_at: null,
    ...change,
  });
  const found = groupCopies([
    copy({ store: "second" }),
    copy({}),
    copy({ verified_at: "2026-01-01T00:00:00Z" }),
    copy({ state: "bad", verified_at: null }),
  ]);
  expect(
    found.map(({ store, state, copies, storedBytes, verifiedAt }) => [store, state, copies, storedBytes, verifiedAt]),
  ).toEqual([
    ["primary", "bad", 1, 10, null],
    ["primary", "verified", 2, 20, "2026-01-01T00:00:00Z"],
    ["second", "verified", 1, 10, "2026-01-02T00:00:00Z"],
  ]);
});

it("tells what an audit event changed, field by field", () => {
  const before = { health: "ok", metrics: { loss: { value: 0.5, nonfinite: null }, bleu: null }, labels: [] };
  const after = {
    health: "quarantined",
    metrics: { loss: { value: 0.25, nonfinite: null }, bleu: null },
    labels: ["a"],
  };
  expect(changedBy({ before, after })).toEqual([
    { path: "health", before: "ok", after: "quarantined" },
    { path: "labels", before: [], after: ["a"] },
    { path: "metrics.loss", before: before.metrics.loss, after: after.metrics.loss },
  ]);
  expect(changedBy({ before: null, after: { state: "trashed", note: null } })).toEqual([
    { path: "state", before: undefined, after: "trashed" },
  ]);
  expect(isOfHealth({ action: "checkpoint.edit", after } as unknown as Schemas["AuditEventView"])).toBe(true);
  expect(isOfHealth({ action: "checkpoint.pin", after: {} } as Schemas["AuditEventView"])).toBe(false);
});
