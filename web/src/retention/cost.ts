import type { Schemas } from "@/api/client";

/** What is paid a month once bytes are freed. A plan says the bytes by store, and a store may have several storage
 * classes: the freed ones are priced as the average byte of their store. Unpriced bytes cost nothing, as before. */
export function costAfter(
  cost: Schemas["CostView"],
  usage: Schemas["UsageView"],
  freedByStore: Readonly<Record<string, number>>,
): number {
  let saved = 0;
  for (const [url, freed] of Object.entries(freedByStore)) {
    const lines = linesOf(cost, usage, url);
    const bytes = sum(lines.map((line) => line.stored_bytes));
    if (bytes > 0) saved += (sum(lines.map((line) => line.per_month)) * Math.min(freed, bytes)) / bytes;
  }
  return Math.max(0, cost.per_month - saved);
}

function linesOf(cost: Schemas["CostView"], usage: Schemas["UsageView"], url: string): Schemas["CostLine"][] {
  const there = usage.stores.filter((store) => store.store_url === url);
  return cost.lines.filter((line) =>
    there.some(
      (store) =>
        store.store === line.store &&
        store.store_kind === line.store_kind &&
        store.storage_class === line.storage_class,
    ),
  );
}

/** Of several plans, by store. */
export function freedByStore(plans: readonly { freed: Schemas["FreedBytes"] }[]): Record<string, number> {
  const found: Record<string, number> = {};
  for (const { freed } of plans)
    for (const [url, bytes] of Object.entries(freed.by_store ?? {})) found[url] = (found[url] ?? 0) + bytes;
  return found;
}

function sum(values: readonly number[]): number {
  return values.reduce((total, each) => total + each, 0);
}
