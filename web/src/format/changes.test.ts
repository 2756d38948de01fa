import { asText, changesOf, inWords } from "./changes";

it("tells the values that differ, by their paths", () => {
  const before = { lr: 0.1, optimizer: { betas: [0.9, 0.95] }, note: null };
  const after = { lr: 0.1, optimizer: { betas: [0.9, 0.99] }, seed: 1, note: null };
  expect(changesOf(before, after)).toEqual([
    { path: "optimizer.betas[1]", before: 0.95, after: 0.99 },
    { path: "seed", before: undefined, after: 1 },
  ]);
  expect(changesOf(null, { lr: 1 })).toEqual([{ path: "lr", before: undefined, after: 1 }]);
});

it("names each variable that another attempt has not, or has otherwise", () => {
  const before = { cuda: "12.4", torch: "2.8", gone: "x" };
  const after = { cuda: "12.6", torch: "2.8", added: "y" };
  expect(changesOf(before, after)).toEqual([
    { path: "added", before: undefined, after: "y" },
    { path: "cuda", before: "12.4", after: "12.6" },
    { path: "gone", before: "x", after: undefined },
  ]);
});

it("takes a metric, and a list where that is asked for, as one value", () => {
  const before = { labels: ["a"], metrics: { loss: { value: 0.5, nonfinite: null } } };
  const after = { labels: ["a", "b"], metrics: { loss: { value: null, nonfinite: "nan" } } };
  expect(changesOf(before, after, { lists: true }).map((each) => [each.path, inWords(each.after)])).toEqual([
    ["labels", "a, b"],
    ["metrics.loss", "nan"],
  ]);
});

it("writes a text as it is, and anything else as JSON", () => {
  expect([asText("adam"), asText(3e-4), asText(null), asText([1, "a"])]).toEqual(["adam", "0.0003", "null", '[1,"a"]']);
});
