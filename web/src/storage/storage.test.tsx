import { QueryClientProvider } from "@tanstack/react-query";
import { createMemoryHistory, RouterProvider } from "@tanstack/react-router";
import { configure, render, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { makeRouter } from "@/app/routes";
import { SESSION, serve } from "@/testing/page";

// What is waited for comes at once; how long a busy machine takes says nothing about the page.
configure({ asyncUtilTimeout: 10_000 });
vi.setConfig({ testTimeout: 60_000 });

const page = (...items: unknown[]) => ({ items, next_cursor: null });
const STORE = {
  role: "primary",
  kind: "s3",
  url: "s3://one",
  claimed: true,
  problem: null,
  checked_at: null,
  weaknesses: [],
};
const DRILL = {
  id: "op_1",
  kind: "drill",
  project: "demo",
  run: "llama",
  state: "done",
  arguments: { store: "primary" },
  progress: {},
  error: null,
  created_at: "2026-01-01T00:00:00Z",
  started_at: "2026-01-01T00:00:00Z",
  ended_at: "2026-01-01T00:02:00Z",
  result: { seconds: 90, rpo_seconds: 3600 },
};

class SilentEventSource extends EventTarget {
  static CLOSED = 2;
  readyState = 0;
  close() {}
}

function open(search: string) {
  vi.stubGlobal("EventSource", SilentEventSource);
  queryClient.clear();
  const asked = serve({
    "GET /v1/sessions/current": () => SESSION,
    "GET /v1/projects": () => page({ id: "1", name: "demo", quota_bytes: 100, stored_bytes: 40, runs: 1 }),
    "GET /v1/projects/demo/runs": () => page({ id: "r1", project: "demo", name: "llama" }),
    "GET /v1/stores": () => page(STORE, { ...STORE, role: "second", problem: "The bucket does not answer." }),
    "GET /v1/store-clocks": () => page(),
    "GET /v1/controllers": () => page({ name: "scrub", due: 12, lag_seconds: 7200, paused_at: null, error: null }),
    "GET /v1/operations": (request) =>
      new URL(request.url).searchParams.get("kind") === "drill" ? page(DRILL) : page(),
    "GET /v1/projects/demo/bad-copies": () => page(),
    "GET /v1/projects/demo/copies": () =>
      page({ run: "llama", store: "second", policy: true, waiting: 2, lag_seconds: 600, lag_steps: 20, lag_bytes: 5 }),
    "GET /v1/projects/demo/runs/llama/tiers/plan": () => ({ rows: [], policy_level: null }),
    "POST /v1/projects/demo/runs/llama/cost/forecast": () => ({ bytes_per_save: 10, save_interval_seconds: 10 }),
    "POST /v1/projects/demo/runs/llama/drills": () => DRILL,
    "GET /v1/sweeps": () => ({ stores: [], problems: [] }),
    "GET /v1/collections/plan": () => ({ at: "2026-01-01T00:00:00Z", stores: [] }),
  });
  const router = makeRouter();
  const history = createMemoryHistory({ initialEntries: [`/ui/storage${search}`] });
  router.update({ ...router.options, history } as never);
  render(
    <QueryClientProvider client={queryClient}>
      <RouterProvider router={router} />
    </QueryClientProvider>,
  );
  return asked;
}

it("tells which store does not answer, how late the scrub is, and when the quota is reached", async () => {
  open("");
  const stores = await screen.findByRole("grid", { name: "Stores" });
  expect(within(stores).getByText("The bucket does not answer.")).toBeVisible();
  expect(within(stores).getByText("unavailable")).toBeVisible();
  expect(await screen.findByText("2 h")).toBeVisible();
  expect(await screen.findByText("1 min")).toBeVisible();
  expect(await screen.findByText("10 min")).toBeVisible();
});

it("shows what drills took and how far they were behind, and starts one of the chosen run", async () => {
  const asked = open("?run=llama");
  const drills = await screen.findByRole("grid", { name: "Operations: drill" });
  expect(within(drills).getByText("1 min 30 s")).toBeVisible();
  expect(within(drills).getByText("1 h")).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Start a drill" }));
  await userEvent.click(screen.getByRole("button", { name: "Start" }));
  const started = asked.find((each) => each.url.endsWith("/drills"));
  expect(JSON.parse((await started?.clone().text()) ?? "")).toEqual({ selector: "latest", store: "primary" });
});
