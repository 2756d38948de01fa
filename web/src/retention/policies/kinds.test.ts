import type { PolicyDocument } from "../rules";
import { copies, objectives, policyInWords, tiers } from "./kinds";

const COPIES = {
  labels: ["release", "paper"],
  kinds: ["final"],
  every_steps: 1000,
  best: { metric: "loss", n: 3 },
};
const TIERS = {
  rules: [
    { after: "7d", storage_class: "rare" },
    { after: "90d", storage_class: "deep_archive" },
  ],
  stay_hot: { labels: ["milestone"], kinds: ["final"], pinned: false },
};

const throughFields = {
  objectives: (base: PolicyDocument) => objectives.write(objectives.read(base), base),
  copies: (base: PolicyDocument) => copies.write(copies.read(base), base),
  tiers: (base: PolicyDocument) => tiers.write(tiers.read(base), base),
};

it.each([
  ["objectives", { rpo_seconds: 3600, rto_seconds: 90 }],
  ["copies", COPIES],
  ["copies", {}],
  ["tiers", TIERS],
  ["tiers", { rules: [{ after: "30d", to: "cold" }] }],
] as const)("gives back the %s that the fields were filled from, and what no field holds", (kind, document) => {
  const base = { ...document, of_a_newer_service: true };
  expect(throughFields[kind](base)).toEqual(base);
});

it("reads spans as people write them, and gives what it cannot read to the service", () => {
  expect(objectives.read({ rpo_seconds: 5400, rto_seconds: 172_800 })).toEqual({ rpo: "90min", rto: "2d" });
  expect(objectives.write({ rpo: "15min", rto: " 30 " }, {})).toEqual({ rpo_seconds: 900, rto_seconds: 30 });
  expect(objectives.write({ rpo: "an hour", rto: "" }, {})).toEqual({ rpo_seconds: "an hour" });
  const best = { metric: "", mode: "min", n: "1" } as const;
  expect(copies.write({ labels: "", kinds: [], everySteps: "1k", best }, {})).toEqual({ every_steps: "1k" });
});

it("says a policy in a line", () => {
  expect(policyInWords("objectives", { rpo_seconds: 3600 })).toBe("RPO 1 h");
  expect(policyInWords("objectives", {})).toBe("no objective");
  expect(policyInWords("tiers", {})).toBe("no rule");
  expect(policyInWords("copies", {})).toBe("every checkpoint");
  expect(policyInWords("copies", COPIES)).toBe(
    "label release, paper, or kind final, or each multiple of 1000 steps, or best 3 by loss (min)",
  );
  expect(policyInWords("tiers", TIERS)).toBe(
    "after 7d: rare, after 90d: deep_archive; hot for ever: label milestone, kind final; pinned ones move, too",
  );
});
