import type { Schemas } from "@/api/client";
import { costAfter, freedByStore } from "./cost";

const GIB = 2 ** 30;
const line = (store: string, storage_class: string | null, stored: number, price: number | null) => ({
  store,
  store_kind: "s3",
  storage_class,
  stored_bytes: stored * GIB,
  per_gib_month: price,
  per_month: price === null ? 0 : stored * price,
});
const place = (store: string, store_url: string, storage_class: string | null) => ({
  store,
  store_kind: "s3",
  store_url,
  storage_class,
});
const USAGE = {
  stores: [
    place("primary", "s3://one", null),
    place("primary", "s3://one", "GLACIER"),
    place("second", "s3://two", null),
  ],
} as Schemas["UsageView"];

function cost(...lines: ReturnType<typeof line>[]): Schemas["CostView"] {
  return { lines, per_month: lines.reduce((sum, each) => sum + each.per_month, 0) } as Schemas["CostView"];
}

it("prices what is freed as the average byte of its store", () => {
  const before = cost(line("primary", null, 10, 2), line("primary", "GLACIER", 10, 0), line("second", null, 20, 1));
  expect(before.per_month).toBe(40);
  expect(costAfter(before, USAGE, { "s3://one": 5 * GIB, "s3://two": 10 * GIB })).toBe(40 - 5 - 10);
});

it("saves nothing on bytes without a price or of a store that it does not know, and never pays less than nothing", () => {
  const before = cost(line("second", null, 20, null), line("primary", null, 1, 3));
  expect(costAfter(before, USAGE, { "s3://two": GIB, "s3://gone": GIB })).toBe(3);
  expect(costAfter(before, USAGE, { "s3://one": 100 * GIB })).toBe(0);
});

it("adds up what several plans free, by store", () => {
  const plans: { freed: Schemas["FreedBytes"] }[] = [
    { freed: { bytes: 3, by_store: { a: 1, b: 2 } } },
    { freed: { bytes: 4, by_store: { a: 4 } } },
    { freed: { bytes: 0 } },
  ];
  expect(freedByStore(plans)).toEqual({ a: 5, b: 2 });
});
