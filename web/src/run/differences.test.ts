import { asText, environmentDifferences } from "./differences";

it("names each variable that another attempt has not, or has otherwise", () => {
  const before = { cuda: "12.4", torch: "2.8", gone: "x" };
  const after = { cuda: "12.6", torch: "2.8", added: "y" };
  expect(environmentDifferences(before, after)).toEqual([
    { path: "added", before: undefined, after: "y" },
    { path: "cuda", before: "12.4", after: "12.6" },
    { path: "gone", before: "x", after: undefined },
  ]);
});

it("writes a text as it is, and anything else as JSON", () => {
  expect([asText("adam"), asText(3e-4), asText(null), asText([1, "a"])]).toEqual(["adam", "0.0003", "null", '[1,"a"]']);
});
