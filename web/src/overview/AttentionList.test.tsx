import { createMemoryHistory, createRootRoute, createRouter, RouterProvider } from "@tanstack/react-router";
import { act, screen } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Session } from "@/api/session";
import { problem, renderSignedIn, serve } from "@/testing/page";
import { AttentionElsewhere, AttentionList } from "./AttentionList";

const page = (...items: unknown[]) => ({ items, next_cursor: null });
const PROJECT = { name: "demo", quota_bytes: null, quota_used_bytes: 0, stored_bytes: 0 };
const moment = new Date().toISOString();
const run = (name: string, status: string) => ({
  ...{ id: name, name, status, project: "demo", latest_attempt: 1, last_heard_at: moment, created_at: moment },
  ...{ committed_checkpoints: 1, restore_point: { step: 1, committed_at: moment } },
});
const ALL_QUIET = {
  "GET /v1/projects/demo": () => PROJECT,
  "GET /v1/projects/demo/runs": () => page(),
  "GET /v1/projects/demo/bad-copies": () => page(),
  "GET /v1/projects/demo/checkpoints": () => page(),
  "GET /v1/events": () => page(),
  "GET /v1/stores": () => page({ role: "primary", problem: null }),
  "GET /v1/projects/demo/copies": () => page(),
  "GET /v1/operations": () => page(),
  "GET /v1/controllers": () => page({ name: "scrub", lag_seconds: 0 }),
};

/** Answers page after page: `cursor` is the number of the page. */
function paged(...pages: unknown[][]) {
  return (request: Request) => {
    const at = Number(new URL(request.url).searchParams.get("cursor") ?? 0);
    return { items: pages[at], next_cursor: at + 1 < pages.length ? String(at + 1) : null };
  };
}

function show(answers: Parameters<typeof serve>[0], session: Partial<Session> = {}) {
  const asked = serve({ ...ALL_QUIET, ...answers });
  const rootRoute = createRootRoute({ component: () => <AttentionList project="demo" /> });
  const router = createRouter({ routeTree: rootRoute, history: createMemoryHistory() });
  renderSignedIn(<RouterProvider router={router as never} />, session);
  return asked;
}

const has = (request: Request, name: string, value: string) =>
  new URL(request.url).searchParams.getAll(name).includes(value);

it("says that nothing needs attention when every list was read to its end", async () => {
  show({});
  expect(await screen.findByText("Nothing needs attention")).toBeVisible();
  expect(screen.getByText(/and every store answers/)).toBeVisible();
});

it("finds a stalled run however many newer ones train", async () => {
  const training = Array.from({ length: 100 }, (_, number) => run(`new-${number}`, "training"));
  show({
    "GET /v1/projects/demo/runs": (request) => {
      if (!has(request, "status", "stalled")) return page(...training);
      // As the service does it: one call for all statuses has the newest 100 alone.
      return has(request, "status", "training") ? { items: training, next_cursor: "1" } : page(run("old", "stalled"));
    },
  });
  expect(await screen.findByText("old")).toBeVisible();
});

it("reads a list to its end before it says that there is nothing", async () => {
  const quiet = Array.from({ length: 100 }, (_, number) => run(`r${number}`, "training"));
  const bare = { ...run("bare", "training"), restore_point: null };
  show({
    "GET /v1/projects/demo/runs": (request) =>
      has(request, "status", "training") ? paged(quiet, quiet, [bare])(request) : page(),
  });
  expect(await screen.findByText("unprotected")).toBeVisible();
  expect(screen.queryByText("Nothing needs attention")).not.toBeInTheDocument();
});

it("gives no all-clear for a list that is longer than what it reads by itself", async () => {
  const many = Array.from({ length: 11 }, (_, at) =>
    Array.from({ length: 100 }, (_, number) => run(`r${at}-${number}`, "training")),
  );
  show({
    "GET /v1/projects/demo/runs": (request) => (has(request, "status", "training") ? paged(...many)(request) : page()),
  });
  await userEvent.click(await screen.findByRole("button", { name: "Read on" }));
  expect(await screen.findByText("Nothing needs attention")).toBeVisible();
});

it("gives no all-clear when a call failed", async () => {
  show({ "GET /v1/projects/demo/bad-copies": () => problem(403, "forbidden", "Not for this token.") });
  expect(await screen.findByRole("alert")).toHaveTextContent("Not for this token.");
  expect(screen.queryByText("Nothing needs attention")).not.toBeInTheDocument();
});

it("finds a new attempt that has no restore point, though no event tells of it", async () => {
  vi.useFakeTimers({ toFake: ["setInterval", "clearInterval"] });
  onTestFinished(() => void vi.useRealTimers());
  const created_at = new Date(Date.now() - 7_200_000).toISOString();
  const bare = { ...run("bare", "training"), created_at, restore_point: null, committed_checkpoints: 0 };
  let started = false;
  show({
    "GET /v1/projects/demo/runs": (request) => (started && has(request, "status", "training") ? page(bare) : page()),
  });
  expect(await screen.findByText("Nothing needs attention")).toBeVisible();
  started = true;
  await act(async () => void vi.advanceTimersByTime(60_000));
  expect(await screen.findByText("unprotected")).toBeVisible();
});

it("asks nothing about stores and the scrub that a project's token may not see, and says nothing about them", async () => {
  const refused = () => problem(403, "forbidden", "No.");
  const asked = show({ "GET /v1/stores": refused, "GET /v1/controllers": refused }, { project: "demo" });
  expect(await screen.findByText("Nothing needs attention")).toBeVisible();
  expect(screen.queryByText(/every store answers/)).not.toBeInTheDocument();
  expect(asked.some(({ url }) => url.includes("/v1/stores") || url.includes("/v1/controllers"))).toBe(false);
});

it("tells missed objectives and a late scrub, and leads to where one acts", async () => {
  const result = { seconds: 90, rto_objective_seconds: 60 };
  const asked = show({
    "GET /v1/projects/demo/copies": () =>
      page({ run: "bert", store: "second", policy: true, error: null, rpo_objective_seconds: 60, rpo_seconds: 600 }),
    "GET /v1/operations": () =>
      page({
        run: "bert",
        state: "done",
        arguments: { store: "second" },
        result,
        created_at: moment,
        ended_at: moment,
      }),
    "GET /v1/projects/demo/runs/bert": () => run("bert", "finished"),
    "GET /v1/controllers": () => page({ name: "scrub", lag_seconds: 200_000, paused_at: null, error: null }),
  });
  const link = async (name: string) => (await screen.findByRole("link", { name })).getAttribute("href");
  expect(await link("Second store")).toBe("/storage?project=demo&late=true#second");
  expect(await link("Drill of bert")).toBe("/storage?project=demo&run=bert#drills");
  expect(await link("Scrub")).toBe("/operations/controllers?project=demo&controller=scrub");
  // The copies of a run that is in time are not asked for: there may be a thousand.
  const late = asked.find(({ url }) => url.includes("/demo/copies"));
  expect(late && has(late, "late", "true")).toBe(true);
  const drills = asked.find(({ url }) => url.includes("/v1/operations"));
  expect(drills && has(drills, "kind", "drill") && has(drills, "project", "demo")).toBe(true);
});

it("leaves out the drill of a run that was deleted since", async () => {
  const failed = { state: "failed", arguments: { store: "second" }, result: null, error: "It is not whole there." };
  show({
    "GET /v1/operations": () => page({ ...failed, run: "gone", created_at: moment, ended_at: moment }),
    "GET /v1/projects/demo/runs/gone": () => problem(404, "run_not_found", "demo/gone was deleted by ops."),
  });
  expect(await screen.findByText("Nothing needs attention")).toBeVisible();
  expect(screen.queryByText(/It is not whole there/)).toBeNull();
});

it("tells a corrupt checkpoint while it is corrupt, and not after its repair", async () => {
  const event = (checkpoint_id: string, step: number) => ({
    ...{ id: `1-${step}`, type: "checkpoint.corrupt", timestamp: moment },
    data: { project: "demo", run: "bert", step, checkpoint_id },
  });
  const asked = show({
    "GET /v1/events": (request) =>
      has(request, "type", "checkpoint.corrupt") ? page(event("ck_bad", 40), event("ck_repaired", 30)) : page(),
    "GET /v1/projects/demo/checkpoints": () =>
      page({ id: "ck_bad", health: "corrupt", health_reason: null, project: "demo", run: "bert", step: 40 }),
  });
  expect(await screen.findByRole("link", { name: "bert, step 40" })).toHaveAttribute(
    "href",
    "/checkpoints/ck_bad?project=demo",
  );
  expect(screen.queryByText("bert, step 30")).not.toBeInTheDocument();
  const list = asked.find((each) => each.url.includes("/checkpoints"));
  expect(list && has(list, "health", "corrupt") && has(list, "state", "committed")).toBe(true);
});

it("tells of the other projects by one list of runs and one of checkpoints", async () => {
  const asked = serve({
    "GET /v1/runs": (request) =>
      has(request, "status", "lost") ? page({ ...run("vit", "lost"), project: "other" }, run("here", "lost")) : page(),
    "GET /v1/checkpoints": () =>
      page({ id: "ck_bad", health: "corrupt", health_reason: null, project: "third", run: "bert", step: 40 }),
  });
  const rootRoute = createRootRoute({ component: () => <AttentionElsewhere project="demo" /> });
  const router = createRouter({ routeTree: rootRoute, history: createMemoryHistory() });
  renderSignedIn(<RouterProvider router={router as never} />);
  expect(await screen.findByText("other/vit")).toBeVisible();
  // Without it the link would open the checkpoint under the project that is chosen.
  expect(await screen.findByRole("link", { name: "third/bert, step 40" })).toHaveAttribute(
    "href",
    "/checkpoints/ck_bad?project=third",
  );
  expect(screen.queryByText(/here/)).not.toBeInTheDocument();
  expect(asked.filter((each) => each.url.includes("/v1/projects/"))).toEqual([]);
});
