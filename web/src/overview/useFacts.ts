import { useQueries } from "@tanstack/react-query";
import { queryOptions, type Schemas, useQuery } from "@/api/client";
import { isGone } from "@/api/problem";
import { useSession } from "@/api/session";
import { useWhole, type Whole } from "@/api/whole";
import { secondsSince } from "@/format/moments";
import { ASKED_AGAIN } from "@/live/refresh";
import { DRILL_RECENT_SECONDS, type Facts, failedDrills, RECENT_SECONDS } from "./attention";

type EventView = Schemas["EventView"];
type Status = Schemas["RunStatus"];

const STOPPED: Status[] = ["stalled", "lost", "failed"];
const TRAINING: Status[] = ["training"];
const BAD_CHECKPOINTS: Schemas["EventType"][] = ["checkpoint.quarantined", "checkpoint.corrupt"];
const STORES: Schemas["EventType"][] = ["store.unavailable", "store.available"];
const BAD_HEALTHS: Schemas["Health"][] = ["quarantined", "corrupt"];
const PAGE = 100;
/** MAX_PAGE of the API: for what may be long, because all that was read is asked for again. */
const LONG_PAGE = 500;

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
  const stopped = useWhole(
    "/v1/projects/{project}/runs",
    { path, query: { status: STOPPED, limit: PAGE } },
    ASKED_AGAIN,
  );
  const training = useWhole(
    "/v1/projects/{project}/runs",
    { path, query: { status: TRAINING, limit: LONG_PAGE } },
    ASKED_AGAIN,
  );
  const badCopies = useWhole("/v1/projects/{project}/bad-copies", { path, query: { limit: PAGE } }, ASKED_AGAIN);
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
  const badCheckpoints = useWhole(
    "/v1/projects/{project}/checkpoints",
    { path, query: { health: BAD_HEALTHS, state: ["committed"], limit: PAGE } },
    ASKED_AGAIN,
  );
  // Those that are in time would be a call for each hundred runs, every minute.
  const copies = useWhole(
    "/v1/projects/{project}/copies",
    { path, query: { late: true, limit: LONG_PAGE } },
    ASKED_AGAIN,
  );
  const drills = useWhole(
    "/v1/operations",
    { query: { project, kind: "drill", limit: LONG_PAGE } },
    {
      ...ASKED_AGAIN,
      isEnough: (newestFirst) =>
        newestFirst.some(({ created_at: at }) => secondsSince(at, now) >= DRILL_RECENT_SECONDS),
    },
  );
  const deletedRuns = useDeleted(
    project,
    failedDrills(drills.items, now).map(({ run }) => run),
  );
  const controllers = useQuery(
    "get",
    "/v1/controllers",
    { params: { query: { limit: PAGE } } },
    { enabled: seesStores, refetchInterval: ASKED_AGAIN.askedAgainAfter },
  );
  const found = useQuery("get", "/v1/projects/{project}", { params: { path } });

  const lists = [stopped, training, badCopies, badCheckpoints, storeEvents, badEvents, copies, drills];
  return {
    ...readingOf(lists, [found, ...(seesStores ? [stores, controllers] : [])]),
    facts: {
      runs: [...stopped.items, ...training.items],
      badCopies: badCopies.items,
      hasAllBadCopies: badCopies.isWhole,
      badCheckpoints: badCheckpoints.items,
      badEvents: badEvents.items,
      storeEvents: storeEvents.items.filter(
        ({ data }) => attached === undefined || attached.some(({ role }) => role === data.store),
      ),
      stores: attached ?? [],
      copies: copies.items,
      hasAllCopies: copies.isWhole,
      drills: drills.items,
      deletedRuns,
      scrub: controllers.data?.items.find(({ name }) => name === "scrub"),
      project: found.data,
    },
    seesStores,
  };
}

const NOTHING: Facts = {
  ...{ runs: [], badCopies: [], hasAllBadCopies: true, badCheckpoints: [], badEvents: [], storeEvents: [], stores: [] },
  ...{ copies: [], hasAllCopies: true, drills: [], deletedRuns: new Set<string>() },
  ...{ scrub: undefined, project: undefined },
};

/** Of these runs, those that are in the trash or purged. The list of operations has theirs, too. */
function useDeleted(project: string, runs: readonly string[]): ReadonlySet<string> {
  const names = [...new Set(runs)];
  return useQueries({
    queries: names.map((run) =>
      queryOptions("get", "/v1/projects/{project}/runs/{run}", { params: { path: { project, run } } }),
    ),
    combine: (replies: { error: unknown }[]) => new Set(names.filter((_, at) => isGone(replies[at]?.error))),
  });
}

/** The same of the projects that are not chosen, by one list of runs for all of them: without their copies and quotas. */
export function useFactsElsewhere(project: string): Known {
  const stopped = useWhole("/v1/runs", { query: { status: STOPPED, limit: PAGE } }, ASKED_AGAIN);
  const training = useWhole("/v1/runs", { query: { status: TRAINING, limit: LONG_PAGE } }, ASKED_AGAIN);
  const corrupt = useWhole(
    "/v1/checkpoints",
    { query: { health: ["corrupt"], state: ["committed"], limit: PAGE } },
    ASKED_AGAIN,
  );
  const isElsewhere = (of: { project: string }) => of.project !== project;
  return {
    ...readingOf([stopped, training, corrupt]),
    facts: {
      ...NOTHING,
      runs: [...stopped.items, ...training.items].filter(isElsewhere),
      badCheckpoints: corrupt.items.filter(isElsewhere),
    },
    seesStores: false,
  };
}

type Reading = Pick<Known, "isReading" | "isWhole" | "failed" | "readOn">;

interface Single {
  data: unknown;
  error: unknown;
  isLoading: boolean;
  refetch: () => Promise<unknown>;
}

function readingOf(lists: readonly Whole<unknown>[], singles: readonly Single[] = []): Reading {
  const failed =
    lists.find((each) => each.error) ??
    singles.filter((each) => each.error).map(({ error, refetch }) => ({ error, retry: () => void refetch() }))[0];
  const cut = lists.filter((each) => !each.isWhole && !each.isReading && !each.error);
  return {
    isReading: lists.some((each) => each.isReading) || singles.some((each) => each.isLoading),
    isWhole: lists.every((each) => each.isWhole) && singles.every((each) => each.data !== undefined),
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
