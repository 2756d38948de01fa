import { documentOf, fieldsOf, rulesInWords, sameRules } from "./rules";

const POLICY = {
  keep_last: 3,
  keep_daily: "unlimited",
  keep_within: "6h",
  keep_every_steps: 1000,
  keep_best: [
    { metric: "loss", n: 2 },
    { metric: "accuracy", mode: "max" },
  ],
  keep_labels: ["milestone", "release"],
};

it("gives back the policy that the fields were filled from", () => {
  expect(documentOf(fieldsOf(POLICY), POLICY)).toEqual(POLICY);
});

it("leaves a rule out whose field is emptied, and keeps what a newer service knows", () => {
  const base = { ...POLICY, keep_fancy: { n: 1 } };
  const fields = fieldsOf(base);
  const emptied = { ...fields, single: { ...fields.single, keep_last: " " }, best: [], labels: " , " };
  expect(documentOf(emptied, base)).toEqual({
    keep_daily: "unlimited",
    keep_within: "6h",
    keep_every_steps: 1000,
    keep_fancy: { n: 1 },
  });
});

it("hands what is no number to the service as it is written", () => {
  const fields = { single: { keep_last: "five", keep_every_steps: "0" }, best: [], labels: "" };
  expect(documentOf(fields, {})).toEqual({ keep_last: "five", keep_every_steps: 0 });
});

it("takes two policies for the same whatever the order of their rules", () => {
  expect(sameRules({ keep_last: 3, keep_within: "6h" }, { keep_within: "6h", keep_last: 3 })).toBe(true);
  expect(sameRules({ keep_last: 3 }, { keep_last: "3" })).toBe(false);
  expect(sameRules({ keep_labels: ["a", "b"] }, { keep_labels: ["b", "a"] })).toBe(false);
});

it("writes a policy on one line", () => {
  expect(rulesInWords(POLICY)).toBe(
    "keep_last 3, keep_daily unlimited, keep_within 6h, keep_every_steps 1000, keep_best 2 by loss (min), " +
      "keep_best 1 by accuracy (max), keep_labels milestone, release",
  );
});
