import type { Query, QueryClient } from "@tanstack/react-query";
import type { Schemas } from "@/api/client";
import { nounOf, touches } from "./touches";

type EventView = Schemas["EventView"];

/** Changes come in bursts, when many ranks commit: what they touch is asked for once. */
const GATHERED_FOR_MS = 1000;
/** A family is all queries of one path, and those of long lists one of their own. It is asked for at most so often. */
const APART_MS = 3000;
/** What the service adds up, or works out of many rows. */
const SLOW = new Set(["advice", "copies", "cost", "goodput", "plan", "projects", "usage"]);
const SLOW_APART_MS = 30_000;
/** So does a list of which more was read: all of it is asked for again, page after page. */
const LONG_ITEMS = 100;
/** Of one family at once: a table has a call for each row in sight. The others follow. */
const MOST_AT_ONCE = 20;

interface Family {
  /** The hashes of those that are to be asked for. */
  waiting: Set<string>;
  askedAt: number;
  apartMs: number;
  timer: number | undefined;
}

/** Asks again for what events have touched: however many there are, each family of queries at most once in its time,
 * and never a query whose call is under way. */
export class Pace {
  private readonly families = new Map<string, Family>();

  constructor(private readonly queries: QueryClient) {}

  take(event: EventView): void {
    for (const query of this.queries.getQueryCache().getAll()) {
      if (!touches(event.type, event.data, query.queryKey)) continue;
      const path = String(query.queryKey[1]);
      const isLong = itemsOf(query.state.data) > LONG_ITEMS;
      const apartMs = isLong || SLOW.has(nounOf(path) ?? "") ? SLOW_APART_MS : APART_MS;
      const name = isLong ? `${path}, long` : path;
      const family = this.families.get(name) ?? { waiting: new Set(), askedAt: 0, apartMs, timer: undefined };
      this.families.set(name, family);
      family.waiting.add(query.queryHash);
      this.plan(family);
    }
  }

  stop(): void {
    for (const family of this.families.values()) window.clearTimeout(family.timer);
    this.families.clear();
  }

  private plan(family: Family): void {
    if (family.timer !== undefined) return;
    const wait = Math.max(GATHERED_FOR_MS, family.askedAt + family.apartMs - Date.now());
    family.timer = window.setTimeout(() => {
      family.timer = undefined;
      this.ask(family);
      if (family.waiting.size > 0) this.plan(family);
    }, wait);
  }

  private ask(family: Family): void {
    family.askedAt = Date.now();
    let asked = 0;
    for (const hash of [...family.waiting]) {
      const query: Query | undefined = this.queries.getQueryCache().get(hash);
      const isSeen = query?.isActive() ?? false;
      // A reply that is under way may be older than the event: it is asked for again afterwards.
      if (isSeen && (query?.state.fetchStatus !== "idle" || asked >= MOST_AT_ONCE)) continue;
      family.waiting.delete(hash);
      if (query === undefined) continue;
      if (isSeen) asked += 1;
      void this.queries.invalidateQueries(
        { predicate: (each) => each.queryHash === hash, refetchType: "active" },
        { cancelRefetch: false },
      );
    }
  }
}

/** How many items of a list were read: of the pages of `usePages`, or of a list that is one reply. */
function itemsOf(data: unknown): number {
  if (Array.isArray(data)) return data.length;
  const { pages } = (data ?? {}) as { pages?: { items?: unknown[] }[] };
  return pages?.reduce((sum, { items }) => sum + (items?.length ?? 0), 0) ?? 0;
}
