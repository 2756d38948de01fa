import { useQueries } from "@tanstack/react-query";
import { queryOptions, type Schemas, useQuery } from "@/api/client";
import { isGone } from "@/api/problem";
import { useSession } from "@/api/session";
import { useWhole } from "@/api/whole";
import { secondsSince } from "@/format/moments";
import { type Facts, RECENT_SECONDS } from "./attention";

type EventView = Schemas["EventView"];
type Status = Schemas["RunStatus"];

const STOPPED: Status[] = ["stalled", "lost", "failed"];
const TRAINING: Status[] = ["training"];
const BAD_CHECKPOINTS: Schemas["EventType"][] = ["checkpoint.quarantined", "checkpoint.corrupt"];
const STORES: Schemas["EventType"][] = ["store.unavailable", "store.available"];
const BAD_HEALTHS: Schemas["Health"][] = ["quarantined", "corrupt"];
const PAGE = 100;
const LONG_PAGE = 500;
/** So many runs of bad checkpoints are asked what is still bad in them. */
const MOST_RUNS = 50;

export interface Known {
  facts: Facts;
  isReading: boolean;
  /** Every list was read to its end: what is not in `facts` is not there. */
  isWhole: boolean;
  /** The token sees the state of the stores. */
  seesStores: boolean;
  /** The first call that failed. */
  failed: { error: unknown; retry: () => void } | undefined;
  /** Reads on in the lists that are longer than what is read at once. undefined: there is none. */
  readOn: (() => void) | undefined;
}

/** What the page knows of a project that may need attention. `now`: milliseconds since 1970. */
export function useFacts(project: string, now: number): Known {
  const seesStores = useSession().project === null;
  const path = { project };
  // Apart: however many runs train, none of them hides one that has stopped.
  const stopped = useWhole("/v1/projects/{project}/runs", { path, query: { status: STOPPED, limit: PAGE } });
  const training = useWhole("/v1/projects/{project}/runs", { path, query: { status: TRAINING, limit: PAGE } });
  const badCopies = useWhole("/v1/projects/{project}/bad-copies", { path, query: { limit: PAGE } });
  const stores = useQuery("get", "/v1/stores", { params: {} }, { enabled: seesStores });
  const attached = stores.data?.items;
  const storeEvents = useWhole(
    "/v1/events",
    { query: { project, type: STORES, limit: LONG_PAGE } },
    {
      isEnough: (events) => attached?.every(({ role }) => events.some((event) => event.data.store === role)) ?? false,
    },
  );
  const badEvents = useWhole(
    "/v1/events",
    { query: { project, type: BAD_CHECKPOINTS, limit: LONG_PAGE } },
    { isEnough: (events) => events.some((event) => !isRecent(event, now)) },
  );
  const found = useQuery("get", "/v1/projects/{project}", { params: { path } });

  const recent = badEvents.items.filter((event) => isRecent(event, now));
  const runs = [...new Set(recent.map((event) => event.data.run ?? ""))].filter(Boolean);
  const bad = useQueries({
    queries: runs.slice(0, MOST_RUNS).map((run) =>
      queryOptions("get", "/v1/projects/{project}/runs/{run}/checkpoints", {
        params: { path: { project, run }, query: { health: BAD_HEALTHS, state: ["committed"], limit: LONG_PAGE } },
      }),
    ),
  });

  const lists = [stopped, training, badCopies, storeEvents, badEvents];
  // A run that was purged meanwhile has nothing bad any more.
  const singles = [found, ...(seesStores ? [stores] : []), ...bad].filter((each) => !isGone(each.error));
  const failed =
    lists.find((each) => each.error) ??
    singles.filter((each) => each.error).map(({ error, refetch }) => ({ error, retry: () => void refetch() }))[0];
  const cut = lists.filter((each) => !each.isWhole && !each.isReading && !each.error);
  const health = new Map(bad.flatMap((each) => each.data?.items ?? []).map((each) => [each.id, each.health] as const));
  const asked = new Set(runs.filter((_, index) => bad[index]?.data !== undefined || isGone(bad[index]?.error)));

  return {
    facts: {
      runs: [...stopped.items, ...training.items],
      badCopies: badCopies.items,
      hasAllBadCopies: badCopies.isWhole,
      // Until a run has said what is bad in it, what was bad may be so still.
      badCheckpoints: recent.filter(
        ({ type, data }) =>
          !asked.has(data.run ?? "") || health.get(data.checkpoint_id ?? "") === type.replace("checkpoint.", ""),
      ),
      storeEvents: storeEvents.items.filter(
        ({ data }) => attached === undefined || attached.some(({ role }) => role === data.store),
      ),
      stores: attached ?? [],
      project: found.data,
    },
    isReading: lists.some((each) => each.isReading) || singles.some((each) => each.isLoading),
    isWhole:
      lists.every((each) => each.isWhole) &&
      singles.every((each) => each.data !== undefined) &&
      runs.length <= MOST_RUNS &&
      bad.every((each) => each.data === undefined || each.data.next_cursor == null),
    seesStores,
    failed: failed && { error: failed.error, retry: failed.retry },
    readOn:
      cut.length === 0
        ? undefined
        : () => {
            for (const each of cut) each.readOn();
          },
  };
}

function isRecent(event: EventView, now: number): boolean {
  return secondsSince(event.timestamp, now) < RECENT_SECONDS;
}
