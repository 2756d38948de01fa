import { createRoute, lazyRouteComponent, redirect } from "@tanstack/react-router";
import type { Schemas } from "@/api/client";
import { frameRoute } from "@/app/frame_route";
import { readMoment } from "@/format/moments";
import { EVENT_TYPES } from "@/live/touches";

export type OperationState = Schemas["OperationState"];
export type EventType = Schemas["EventType"];
export type ActorKind = Schemas["AuditEventView"]["actor_kind"];

/** Each state once; one that is missing is an error of the compiler. */
const EACH: Record<OperationState, true> = { queued: true, running: true, done: true, failed: true, cancelled: true };
export const OPERATION_STATES = Object.keys(EACH) as OperationState[];

type Search = Record<string, unknown>;

const text = (value: unknown): string | undefined => {
  const found = typeof value === "number" ? String(value) : value;
  return typeof found === "string" && found !== "" ? found : undefined;
};
const moment = (value: unknown): string | undefined => readMoment(text(value) ?? "");
/** Present and true, or absent: an address has no `everywhere=false`. */
const flag = (value: unknown): true | undefined => (value === true ? true : undefined);

export const operationsRoute = createRoute({
  getParentRoute: () => frameRoute,
  path: "/operations",
  component: lazyRouteComponent(() => import("./OperationsScreen"), "OperationsScreen"),
});

const indexRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/",
  beforeLoad: () => {
    throw redirect({ to: "/operations/controllers", replace: true });
  },
});

interface ControllersSearch {
  /** The one whose last pass is shown. */
  controller?: string | undefined;
}

const controllersRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/controllers",
  validateSearch: (search: Search): ControllersSearch => ({ controller: text(search.controller) }),
  component: lazyRouteComponent(() => import("./background/Controllers"), "Controllers"),
});

interface LongSearch {
  state?: OperationState | undefined;
  kind?: string | undefined;
  run?: string | undefined;
  /** Of every project that the token sees. */
  everywhere?: true | undefined;
  /** The operation whose arguments and result are shown. */
  operation?: string | undefined;
}

const longRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/long",
  validateSearch: (search: Search): LongSearch => ({
    state: OPERATION_STATES.find((each) => each === search.state),
    kind: text(search.kind),
    run: text(search.run),
    everywhere: flag(search.everywhere),
    operation: text(search.operation),
  }),
  component: lazyRouteComponent(() => import("./background/LongOperations"), "LongOperations"),
});

interface EventsSearch {
  type?: EventType[] | undefined;
  run?: string | undefined;
  since?: string | undefined;
  until?: string | undefined;
  everywhere?: true | undefined;
}

const eventsRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/events",
  validateSearch: (search: Search): EventsSearch => {
    const asked: unknown[] = Array.isArray(search.type) ? search.type : [search.type];
    const types = EVENT_TYPES.filter((each) => asked.includes(each));
    return {
      type: types.length > 0 ? types : undefined,
      run: text(search.run),
      since: moment(search.since),
      until: moment(search.until),
      everywhere: flag(search.everywhere),
    };
  },
  component: lazyRouteComponent(() => import("./events/Events"), "Events"),
});

interface WebhooksSearch {
  /** The webhook whose calls are shown. */
  webhook?: string | undefined;
}

const webhooksRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/webhooks",
  validateSearch: (search: Search): WebhooksSearch => ({ webhook: text(search.webhook) }),
  component: lazyRouteComponent(() => import("./events/Webhooks"), "Webhooks"),
});

const tokensRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/tokens",
  component: lazyRouteComponent(() => import("./access/Tokens"), "Tokens"),
});

interface ProjectsSearch {
  /** Those in the trash. */
  deleted?: true | undefined;
}

const projectsRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/projects",
  validateSearch: (search: Search): ProjectsSearch => ({ deleted: flag(search.deleted) }),
  component: lazyRouteComponent(() => import("./projects/Projects"), "Projects"),
});

export interface AuditSearch {
  actor?: string | undefined;
  actor_kind?: ActorKind | undefined;
  /** What the action begins with. */
  action?: string | undefined;
  /** Every action that deletes; `action` is left out. */
  deletions?: true | undefined;
  run?: string | undefined;
  checkpoint?: string | undefined;
  since?: string | undefined;
  until?: string | undefined;
  everywhere?: true | undefined;
  /** The number of the audit event that is shown whole. */
  event?: number | undefined;
}

const auditRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/audit",
  validateSearch: (search: Search): AuditSearch => ({
    actor: text(search.actor),
    actor_kind: search.actor_kind === "person" || search.actor_kind === "controller" ? search.actor_kind : undefined,
    action: text(search.action),
    deletions: flag(search.deletions),
    run: text(search.run),
    checkpoint: text(search.checkpoint),
    since: moment(search.since),
    until: moment(search.until),
    everywhere: flag(search.everywhere),
    event: typeof search.event === "number" ? search.event : undefined,
  }),
  component: lazyRouteComponent(() => import("./access/Audit"), "Audit"),
});

const workersRoute = createRoute({
  getParentRoute: () => operationsRoute,
  path: "/workers",
  component: lazyRouteComponent(() => import("./background/Workers"), "Workers"),
});

export const operationsRoutes = operationsRoute.addChildren([
  indexRoute,
  controllersRoute,
  longRoute,
  eventsRoute,
  webhooksRoute,
  tokensRoute,
  projectsRoute,
  auditRoute,
  workersRoute,
]);
