import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import type { Session } from "@/api/session";
import { openPage, problem, SESSION, serve } from "@/testing/page";

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

const COPIES = {
  ...{ run: "llama", store: "second", policy: true, waiting: 2 },
  ...{ lag_seconds: 600, lag_steps: 20, lag_bytes: 5 },
};
const PROJECT = { id: "1", name: "demo", quota_bytes: 100, quota_used_bytes: 40, stored_bytes: 90, runs: 1 };
type Answers = Parameters<typeof serve>[0];

function open(search: string, answers: Answers = {}, session: Partial<Session> = {}) {
  queryClient.clear();
  const asked = serve({
    "GET /v1/sessions/current": () => ({ ...SESSION, ...session }),
    "GET /v1/projects": () => page(PROJECT),
    "GET /v1/projects/demo": () => PROJECT,
    "GET /v1/projects/demo/runs": () => page({ id: "r1", project: "demo", name: "llama" }),
    "GET /v1/stores": () => page(STORE, { ...STORE, role: "second", problem: "The bucket does not answer." }),
    "GET /v1/store-clocks": () => page({ role: "primary", problem: null }),
    "GET /v1/controllers": () => page({ name: "scrub", due: 12, lag_seconds: 7200, paused_at: null, error: null }),
    "GET /v1/operations": (request) =>
      new URL(request.url).searchParams.get("kind") === "drill" ? page(DRILL) : page(),
    "GET /v1/projects/demo/bad-copies": () => page(),
    "GET /v1/projects/demo/copies": () => page(COPIES),
    "GET /v1/projects/demo/policies/objectives": () => problem(404, "policy_not_found", "There is none."),
    "GET /v1/projects/demo/runs/llama/policies/objectives": () => problem(404, "policy_not_found", "There is none."),
    "GET /v1/projects/demo/runs/llama/tiers/plan": () => ({ rows: [], policy_level: null }),
    "POST /v1/projects/demo/runs/llama/cost/forecast": () => ({ bytes_per_save: 10, save_interval_seconds: 10 }),
    "POST /v1/projects/demo/runs/llama/drills": () => DRILL,
    "GET /v1/sweeps": () => ({ stores: [], problems: [] }),
    "GET /v1/collections/plan": () => ({ at: "2026-01-01T00:00:00Z", stores: [] }),
    ...answers,
  });
  openPage(`/ui/storage${search}`);
  return asked;
}

it("tells which store does not answer, how late the scrub is, and when the quota is reached", async () => {
  open("");
  const stores = await screen.findByRole("grid", { name: "Stores" });
  expect(within(stores).getByText("The bucket does not answer.")).toBeVisible();
  expect(within(stores).getByText("unavailable")).toBeVisible();
  expect(await screen.findByText("2 h")).toBeVisible();
  // 60 of 100 bytes are left, and each second adds one: the bytes of other stores do not count.
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

it("drills the checkpoint that is named", async () => {
  const asked = open("?run=llama");
  await userEvent.type(await screen.findByLabelText("Which checkpoint"), " best:loss ");
  await userEvent.click(screen.getByRole("button", { name: "Start a drill" }));
  expect(screen.getByRole("dialog")).toHaveTextContent("Restore best:loss of llama from the primary store");
  await userEvent.click(screen.getByRole("button", { name: "Start" }));
  const started = asked.find((each) => each.url.endsWith("/drills"));
  expect(JSON.parse((await started?.clone().text()) ?? "")).toEqual({ selector: "best:loss", store: "primary" });
});

it("compares drills and the second store with the objectives", async () => {
  open("?run=llama", {
    "GET /v1/projects/demo/runs/llama/policies/objectives": () => ({
      document: { rpo_seconds: 300, rto_seconds: 120 },
    }),
    "GET /v1/projects/demo/copies": () => page({ ...COPIES, rpo_objective_seconds: 300, rpo_seconds: 600 }),
    "GET /v1/operations": (request) =>
      new URL(request.url).searchParams.get("kind") === "drill"
        ? page({ ...DRILL, result: { ...DRILL.result, rto_objective_seconds: 120, rpo_objective_seconds: 300 } })
        : page(),
  });
  const region = await screen.findByRole("region", { name: "Drills" });
  // The objectives come after the drills, and draw their table anew.
  await waitFor(() => expect(within(region).getByText("met")).toBeVisible());
  expect(within(region).getByText("missed")).toBeVisible();
  expect(within(region).getByText("2 min")).toBeVisible();
  const copies = await screen.findByRole("grid", { name: "Copies in the second store" });
  expect(within(copies).getByText("late")).toBeVisible();
});

it("offers each run of the project, however old", async () => {
  open("", {
    "GET /v1/projects/demo/runs": (request) =>
      new URL(request.url).searchParams.has("cursor")
        ? page({ id: "r0", project: "demo", name: "old" })
        : { items: [{ id: "r1", project: "demo", name: "llama" }], next_cursor: "1" },
    "POST /v1/projects/demo/runs/old/cost/forecast": () => ({ bytes_per_save: 10, save_interval_seconds: 10 }),
  });
  expect(await screen.findByRole("option", { name: "old" })).toBeInTheDocument();
});

it("lists the runs alone that miss their objective, by the link from Overview", async () => {
  const asked = open("?late=true");
  const copies = () => asked.filter(({ url }) => url.includes("/demo/copies")).map(({ url }) => new URL(url).search);
  const late = await screen.findByLabelText("Only runs that miss their objective (RPO)");
  expect(late).toBeChecked();
  await waitFor(() => expect(copies()).toEqual(["?limit=100&late=true"]));
  await userEvent.click(late);
  await waitFor(() => expect(copies().at(-1)).toBe("?limit=100"));
});

it("says that a forecast failed, and does not show it as none", async () => {
  open("", {
    "POST /v1/projects/demo/runs/llama/cost/forecast": () => problem(403, "forbidden", "Not for this token."),
  });
  const quota = await screen.findByRole("region", { name: "Quota" });
  expect(await within(quota).findByText("There is no forecast now, because a call failed.")).toBeVisible();
  expect(within(quota).getByRole("alert")).toHaveTextContent("Not for this token.");
  expect(within(quota).queryByText(/Quota reached/)).not.toBeInTheDocument();
});

it("names the runs that are too new for a forecast", async () => {
  open("", {
    "POST /v1/projects/demo/runs/llama/cost/forecast": () => problem(422, "invalid_request", "It saved once."),
  });
  expect(await screen.findByText("Without 1 run that saved too few times to tell anything.")).toBeVisible();
});

it("makes no call that a project's token may not make, and says why", async () => {
  const refused = () => problem(403, "forbidden", "For every project only.");
  const asked = open(
    "",
    { "GET /v1/stores": refused, "GET /v1/controllers": refused, "GET /v1/sweeps": refused },
    { project: "demo" },
  );
  for (const what of ["Stores", "The scrub of the service", "Orphans"]) {
    expect(await screen.findByText(`${what}: not for this token`)).toBeVisible();
  }
  expect(await screen.findByText("1 min")).toBeVisible();
  const paths = asked.map((each) => new URL(each.url).pathname);
  for (const path of ["/v1/stores", "/v1/controllers", "/v1/sweeps"]) expect(paths).not.toContain(path);
  expect(screen.getByRole("button", { name: "Look for orphans" })).toHaveAttribute("aria-disabled", "true");
});

it("starts a drill once, however often its reply is lost", async () => {
  const keys: (string | null)[] = [];
  open("?run=llama", {
    "POST /v1/projects/demo/runs/llama/drills": (request) => {
      keys.push(request.headers.get("Idempotency-Key"));
      return keys.length === 1 ? problem(503, "busy", "Too many calls are under way.") : DRILL;
    },
  });
  await userEvent.click(await screen.findByRole("button", { name: "Start a drill" }));
  await userEvent.click(screen.getByRole("button", { name: "Start" }));
  expect(await screen.findByText("Too many calls are under way.")).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Start" }));
  await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
  expect(keys[0]).toMatch(/^[0-9a-f]{32}$/);
  expect(keys[1]).toBe(keys[0]);
});

it("follows a drill until it has ended", async () => {
  let calls = 0;
  open("?run=llama", {
    "GET /v1/operations": (request) => {
      if (new URL(request.url).searchParams.get("kind") !== "drill") return page();
      calls += 1;
      return page(calls < 3 ? { ...DRILL, state: "running", ended_at: null, result: null } : DRILL);
    },
  });
  const drills = await screen.findByRole("grid", { name: "Operations: drill" });
  expect(within(drills).getByText("running")).toBeVisible();
  expect(await within(drills).findByText("done")).toBeVisible();
});

it("shows the quotas of objects, runs and checkpoints that there are, and the soft ones", async () => {
  const quotas = [
    { kind: "bytes", hard: 100, soft: 50, used: 40 },
    { kind: "objects", hard: null, soft: null, used: 7 },
    { kind: "runs", hard: 5, soft: null, used: 4 },
  ];
  open("", { "GET /v1/projects/demo": () => ({ ...PROJECT, quotas }) });
  const quota = await screen.findByRole("region", { name: "Quota" });
  expect(await within(quota).findByText("4 used, of 5")).toBeVisible();
  expect(within(quota).getByText(/used, told from 50/)).toBeVisible();
  expect(within(quota).queryByText("Quota of objects")).not.toBeInTheDocument();
});
