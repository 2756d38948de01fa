import { QueryClientProvider } from "@tanstack/react-query";
import { createMemoryHistory, RouterProvider } from "@tanstack/react-router";
import { act, fireEvent, render, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { makeRouter } from "@/app/routes";
import { problem, SESSION, serve } from "@/testing/page";
import { attempt, checkpoint } from "./examples";

const plots = vi.hoisted(() => ({ made: 0, data: [] as unknown[] }));
// jsdom has no canvas: the curve's numbers are read from its table.
vi.mock("uplot", () => ({
  default: class {
    constructor() {
      plots.made += 1;
    }
    setData(data: unknown[]) {
      plots.data = data;
    }
    destroy() {}
    setSize() {}
  },
}));

const RUN = "/v1/projects/demo/runs/llama";
const page = (...items: unknown[]) => ({ items, next_cursor: null });
const CHECKPOINTS = [
  checkpoint(2, 300, { health: "diverged", health_reason: "loss is NaN" }),
  checkpoint(2, 200, { metrics: { loss: { value: 1.5 } }, labels: ["best"] }),
  checkpoint(1, 100, { metrics: { loss: { value: 2.5 } } }),
];
const ATTEMPTS = [
  attempt(2, {
    ...{ resumed_from: "ck-1-100", last_step: 300, environment: { cuda: "12.6" } },
    skipped: [{ checkpoint_id: "ck-1-150", step: 150, attempt: 1, reason: "aborted", detail: "Not all ranks sealed." }],
  }),
  attempt(1, {
    last_step: 150,
    outcome: "failed",
    outcome_detail: "ECC error",
    error_rank: 3,
    environment: { cuda: "12.4" },
  }),
];
/** What the service says of these metrics: values by step. */
const measured = (curves: Record<string, Record<number, number | "nan">>) => ({
  attempt: null,
  segments: [
    { attempt: 2, max_step: null },
    { attempt: 1, max_step: 100 },
  ],
  names: Object.keys(curves),
  metrics: Object.entries(curves).map(([name, values]) => ({
    name,
    points: Object.entries(values).map(([step, value]) => ({
      step: Number(step),
      attempt: 2,
      ...(value === "nan" ? { value: null, nonfinite: value } : { value, nonfinite: null }),
    })),
  })),
});
type Curves = Parameters<typeof measured>[0];
/** An answer: these along the lineage, and what the attempt that it is asked for has left behind. */
const history =
  (curves: Curves, left: Curves = {}) =>
  (request: Request) =>
    measured(new URL(request.url).searchParams.has("attempt") ? left : curves);
const SPENT = {
  wall_seconds: 100,
  productive_seconds: 80,
  lost_seconds: 10,
  saving_seconds: 5,
  restoring_seconds: 3,
  restarting_seconds: 2,
  idle_seconds: 0,
  steps_run: 350,
  steps_kept: 300,
  steps_lost: 50,
};
const POINT = { checkpoint_id: "ck-2-200", step: 200, attempt: 2, world_size: 2, logical_bytes: 2048, digest: "d" };
const ANSWERS = {
  "GET /v1/sessions/current": () => SESSION,
  "GET /v1/projects": () => page({ id: "1", name: "demo", created_at: "2026-01-01T00:00:00Z" }),
  [`GET ${RUN}`]: () => ({
    id: "r",
    project: "demo",
    name: "llama",
    created_at: "2026-01-01T00:00:00Z",
    latest_attempt: 2,
    status: "training",
    committed_checkpoints: 3,
    last_step: 300,
  }),
  [`GET ${RUN}/attempts`]: () => page(...ATTEMPTS),
  [`GET ${RUN}/attempts/1`]: () => ATTEMPTS[1],
  [`GET ${RUN}/attempts/2`]: () => ATTEMPTS[0],
  [`GET ${RUN}/attempts/2/config`]: (request: Request) => {
    // Without a choice the service takes the newest one before that gave a configuration.
    const against = Number(new URL(request.url).searchParams.get("against") ?? 1);
    const differences = [{ path: "optimizer.lr", before: 0.1, after: 0.01, change: "changed" }];
    const config = { optimizer: { lr: 0.01 } };
    return { attempt: 2, config, compared_with: against, differences, differences_left_out: 0 };
  },
  [`GET ${RUN}/checkpoints`]: (request: Request) => {
    const health = new URL(request.url).searchParams.get("health");
    return page(...CHECKPOINTS.filter((each) => health === null || each.health === health));
  },
  [`GET ${RUN}/metrics-history`]: () => measured({}),
  [`GET ${RUN}/goodput`]: () => ({
    ...SPENT,
    goodput: 0.8,
    since: null,
    until: null,
    attempts: [
      { ...SPENT, attempt: 1, outcome: "failed", last_step: 150, resumed_from_step: null, step_seconds: 0.2 },
      { ...SPENT, attempt: 2, outcome: null, last_step: 300, resumed_from_step: 100, step_seconds: 0.2, steps_lost: 0 },
    ],
  }),
  [`GET ${RUN}/restore-point`]: () => ({
    restore_point: { ...POINT, committed_at: "2026-01-01T01:00:00Z" },
    skipped: [{ checkpoint_id: "ck-2-300", step: 300, attempt: 2, reason: "diverged", detail: "loss is NaN" }],
    ever_committed: true,
    note: "",
  }),
  [`GET ${RUN}/samples`]: () => page(),
  [`GET ${RUN}/advice`]: () => ({
    interval_seconds: 600,
    steps: 120,
    reasons: ["Two interruptions in a day."],
    outlook: [{ interval_seconds: 600, lost_share: 0.01 }],
  }),
};

const IN_TRASH = {
  ...{ deleted_by: "ops", reason: "a failed idea", deleted_at: "2026-01-02T00:00:00Z" },
  purge_at: "2999-01-05T00:00:00Z",
};

class SilentEventSource extends EventTarget {
  static CLOSED = 2;
  readyState = 0;
  close() {}
}

function open(address: string) {
  vi.stubGlobal("EventSource", SilentEventSource);
  queryClient.clear();
  const router = makeRouter();
  router.update({ ...router.options, history: createMemoryHistory({ initialEntries: [address] }) } as never);
  render(
    <QueryClientProvider client={queryClient}>
      <RouterProvider router={router} />
    </QueryClientProvider>,
  );
  return router;
}

/** From now on the clock that asks again goes by `pass` alone. */
function stopTheClock() {
  vi.useFakeTimers({ toFake: ["setInterval", "clearInterval"] });
  onTestFinished(() => void vi.useRealTimers());
}
const pass = (milliseconds: number) => act(async () => void vi.advanceTimersByTime(milliseconds));

const cells = (row: HTMLElement | undefined) =>
  within(row as HTMLElement)
    .getAllByRole("gridcell")
    .map((each) => each.textContent);

it("shows tags and note, and edits the version that was seen", async () => {
  const now = { ...ANSWERS[`GET ${RUN}`](), tags: ["paper"], note: "Twice the data.", etag: '"1"' };
  const sent: unknown[] = [];
  serve({
    ...ANSWERS,
    [`GET ${RUN}`]: () => ({ ...now }),
    [`PATCH ${RUN}`]: async (request: Request) => {
      const seen = request.headers.get("if-match");
      sent.push([seen, await request.json()]);
      return seen === now.etag ? now : problem(412, "edit_conflict", "Somebody was faster. Look again.");
    },
  });
  open("/ui/runs/llama?project=demo");
  expect(await screen.findByText("Twice the data.")).toBeVisible();
  expect(screen.getByRole("link", { name: "paper" })).toHaveAttribute("href", "/ui/runs?project=demo&tag=paper");
  await userEvent.click(screen.getByRole("button", { name: "Edit the tags and the note" }));
  const dialog = within(screen.getByRole("dialog", { name: "Tags and note of llama" }));
  expect(dialog.getByLabelText("Note")).toHaveValue("Twice the data.");
  await userEvent.type(dialog.getByLabelText(/^Tags/), " baseline");
  Object.assign(now, { etag: '"2"', note: "Half the data." });
  await userEvent.click(dialog.getByRole("button", { name: "Save" }));
  expect(await dialog.findByText(/^note/)).toHaveTextContent("note: Twice the data. → became Half the data.");
  await userEvent.click(dialog.getByRole("button", { name: "Reload, and go on from there" }));
  await userEvent.click(dialog.getByRole("button", { name: "Save" }));
  await vi.waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  // The note is the other person's: it was left alone here.
  const edit = { tags: ["paper", "baseline"] };
  expect(sent).toEqual([
    ['"1"', edit],
    ['"2"', edit],
  ]);
  expect(await screen.findByText("Half the data.")).toBeVisible();
});

it("lets a token without the scope edit no tags", async () => {
  serve({ ...ANSWERS, "GET /v1/sessions/current": () => ({ ...SESSION, scopes: ["read"] }) });
  open("/ui/runs/llama?project=demo");
  const button = await screen.findByRole("button", { name: "Edit the tags and the note" });
  expect(button).toHaveAttribute("aria-disabled", "true");
});

it("tells the restore point, and why nothing newer is one", async () => {
  serve(ANSWERS);
  open("/ui/runs/llama?project=demo");
  const section = await screen.findByRole("region", { name: "Restore point" });
  expect(await within(section).findByRole("link", { name: "200" })).toHaveAttribute(
    "href",
    "/ui/checkpoints/ck-2-200?project=demo",
  );
  const skipped = within(section).getByRole("row", { name: /300/ });
  expect(skipped).toHaveTextContent(/#2diverged.*loss is NaN/);
});

it("draws the attempts, and says the same in a table", async () => {
  serve(ANSWERS);
  open("/ui/runs/llama?project=demo");
  const table = await screen.findByRole("grid", { name: "Attempts" });
  const [, second, first] = await within(table).findAllByRole("row");
  expect(cells(second).slice(0, 5)).toEqual(["#2", "open", "100 #1", "300", "0"]);
  expect(cells(first).slice(0, 5)).toEqual(["#1", "failed", expect.stringContaining("began anew"), "150", "50"]);
  expect(first).toHaveTextContent("rank 3: ECC error");
  expect(first).toHaveTextContent("not known");
  act(() => within(table).getByText("150 aborted").focus());
  expect(await screen.findByRole("tooltip")).toHaveTextContent("Step 150: Not all ranks sealed.");
  const drawing = screen.getByTestId("timeline");
  expect(drawing).toHaveTextContent("Attempt 1: failed at step 150. ECC error");
  expect(drawing).toHaveTextContent("Attempt 2 resumed from step 100");
  expect(drawing).toHaveTextContent("Steps 101 to 150 are lost: 50");
  expect(drawing).toHaveTextContent("Step 200: restore point");
});

it("asks again for a run that trains, and for its last step", async () => {
  stopTheClock();
  let last_step = 300;
  serve({ ...ANSWERS, [`GET ${RUN}`]: () => ({ ...ANSWERS[`GET ${RUN}`](), last_step }) });
  open("/ui/runs/llama?project=demo");
  const figure = (await screen.findByText("Last step")).parentElement;
  expect(figure).toHaveTextContent("300");
  last_step = 345;
  await pass(30_000);
  await vi.waitFor(() => expect(figure).toHaveTextContent("345"));
});

it("sees a launch after the last attempt has ended", async () => {
  stopTheClock();
  const ended = attempt(1, { last_step: 150, outcome: "failed", ended_at: "2026-01-01T02:00:00Z" });
  const known = [ended];
  serve({ ...ANSWERS, [`GET ${RUN}/attempts`]: () => page(...known) });
  open("/ui/runs/llama?project=demo");
  const table = await screen.findByRole("grid", { name: "Attempts" });
  known.unshift(attempt(2));
  await pass(60_000);
  expect(await within(table).findByRole("link", { name: "#2" })).toBeVisible();
});

it("keeps the plot, with its cursor, when a heartbeat brings nothing to draw", async () => {
  let told = {};
  serve({ ...ANSWERS, [`GET ${RUN}/attempts`]: () => page({ ...ATTEMPTS[0], ...told }, ATTEMPTS[1]) });
  open("/ui/runs/llama?project=demo");
  await screen.findByRole("figure", { name: "loss over steps" });
  expect(await screen.findByText("150 aborted")).toBeVisible();
  const { made } = plots;
  plots.data = [];
  told = { heartbeat_at: "2026-01-01T03:00:00Z", host: "node-7" };
  await act(() => queryClient.invalidateQueries({ queryKey: ["get", "/v1/projects/{project}/runs/{run}/attempts"] }));
  expect(await screen.findByText("node-7")).toBeInTheDocument();
  expect(plots).toEqual({ made, data: [] });
});

it("puts new points and steps into the plot that is there", async () => {
  let last_step = 300;
  serve({
    ...ANSWERS,
    [`GET ${RUN}/attempts`]: () => page({ ...ATTEMPTS[0], last_step }, ATTEMPTS[1]),
    [`GET ${RUN}/metrics-history`]: (request) => history({ loss: { 200: 1.5, [last_step]: 1.25 } })(request),
  });
  open("/ui/runs/llama?project=demo");
  const curve = await screen.findByRole("figure", { name: "loss over steps" });
  await vi.waitFor(() => expect(curve).toHaveTextContent("3001.25"));
  const { made } = plots;
  last_step = 345;
  await act(() => queryClient.invalidateQueries({ queryKey: ["get"] }));
  await vi.waitFor(() => expect(plots.data[0]).toEqual([100, 200, 345]));
  expect(plots.made).toBe(made);
});

it("gives the values of the metric as a table", async () => {
  serve(ANSWERS);
  open("/ui/runs/llama?project=demo");
  const curve = await screen.findByRole("figure", { name: "loss over steps" });
  await userEvent.click(within(curve).getByText("loss over steps as a table"));
  expect(within(curve).getByRole("row", { name: "200 1.5" })).toBeInTheDocument();
});

it("draws what the jobs measured at each step, with the checkpoints on it", async () => {
  const curves = { loss: { 199: 1.6, 200: 1.5, 201: 9, 202: "nan" as const } };
  const asked = serve({ ...ANSWERS, [`GET ${RUN}/metrics-history`]: history(curves) });
  open("/ui/runs/llama?project=demo&from=150&to=300");
  const curve = await screen.findByRole("figure", { name: "loss over steps" });
  await userEvent.click(within(curve).getByText("loss over steps as a table"));
  expect(await within(curve).findByRole("row", { name: "Step loss loss of checkpoints" })).toBeInTheDocument();
  expect(within(curve).getByRole("row", { name: "200 1.5 1.5" })).toBeInTheDocument();
  expect(within(curve).getByRole("row", { name: "202 – –" })).toBeInTheDocument();
  expect(screen.getByText("Least 1.5 at step 200, greatest 9 at step 201. Not finite: nan at step 202.")).toBeVisible();
  const queries = asked.map((each) => new URL(each.url)).filter((each) => each.pathname.endsWith("metrics-history"));
  expect(new Set(queries.map((each) => each.search))).toEqual(
    new Set([
      "?name=loss&from_step=150&to_step=300&points=1000",
      "?name=loss&attempt=1&from_step=150&to_step=300&points=1000",
    ]),
  );
});

it("keeps the branch drawn that the run has left, from where it was left", async () => {
  const asked = serve({
    ...ANSWERS,
    [`GET ${RUN}/metrics-history`]: history({ loss: { 100: 2.5, 101: 2.4 } }, { loss: { 101: 7, 150: "nan" } }),
  });
  open("/ui/runs/llama?project=demo");
  const curve = await screen.findByRole("figure", { name: "loss over steps" });
  await userEvent.click(within(curve).getByText("loss over steps as a table"));
  const branch = "loss, attempt 1, not on the lineage";
  expect(await within(curve).findByRole("columnheader", { name: branch })).toBeVisible();
  expect(within(curve).getByRole("row", { name: "101 2.4 – 7" })).toBeInTheDocument();
  const left = asked.map(({ url }) => new URL(url).searchParams).find((each) => each.has("attempt"));
  expect([left?.get("attempt"), left?.get("from_step")]).toEqual(["1", "101"]);
  // The extremes are those of what the run has.
  expect(screen.getByText(/^Least 2.4 at step 101, greatest 2.5 at step 100/)).toBeVisible();
});

it("shows another metric by the address, and asks for that one alone", async () => {
  const curves = { grad_norm: { 1: 4.5 }, loss: { 1: 2.5 } };
  const named = (request: Request) => new URL(request.url).searchParams.getAll("name");
  const asked = serve({
    ...ANSWERS,
    [`GET ${RUN}/metrics-history`]: (request) => {
      const whole = history(curves)(request);
      return { ...whole, metrics: whole.metrics.filter(({ name }) => named(request).includes(name)) };
    },
  });
  const router = open("/ui/runs/llama?project=demo");
  await screen.findByRole("option", { name: "grad_norm" });
  await userEvent.selectOptions(screen.getByLabelText("Metric"), "grad_norm");
  const curve = await screen.findByRole("figure", { name: "grad_norm over steps" });
  expect(await within(curve).findByText("4.5")).toBeInTheDocument();
  expect(router.state.location.search).toMatchObject({ metric: "grad_norm" });
  const histories = asked.filter((each) => new URL(each.url).pathname.endsWith("metrics-history"));
  expect(new Set(histories.map((each) => named(each).join()))).toEqual(new Set(["loss", "grad_norm"]));
});

it("says what went wrong with the curve, and draws what checkpoints carry", async () => {
  serve({ ...ANSWERS, [`GET ${RUN}/metrics-history`]: () => problem(500, "internal", "The catalog did not answer.") });
  open("/ui/runs/llama?project=demo");
  expect(await screen.findByRole("figure", { name: "loss over steps" })).toBeInTheDocument();
  const section = screen.getByRole("region", { name: "Attempts over steps" });
  expect(await within(section).findByRole("alert")).toHaveTextContent("The catalog did not answer.");
});

it("says how to give metrics where there are none", async () => {
  serve({ ...ANSWERS, [`GET ${RUN}/checkpoints`]: () => page(checkpoint(1, 100)) });
  open("/ui/runs/llama?project=demo");
  expect(await screen.findByText(/No metric of this run is known/)).toHaveTextContent(
    "ckpt.step(step, state, metrics=…)",
  );
  expect(screen.queryByLabelText("Metric")).toBeNull();
});

it("compares two attempts, which stand in the address", async () => {
  const asked = serve(ANSWERS);
  const against = () =>
    asked.filter(({ url }) => url.includes("/config")).map(({ url }) => new URL(url).searchParams.get("against"));
  const router = open("/ui/runs/llama?project=demo");
  const section = await screen.findByRole("region", { name: "Differences between attempts" });
  expect(await within(section).findByRole("row", { name: "optimizer.lr 0.1 0.01" })).toBeInTheDocument();
  expect(await within(section).findByRole("row", { name: "cuda 12.4 12.6" })).toBeInTheDocument();
  await userEvent.click(within(section).getByRole("button", { name: "Compare" }));
  expect(router.state.location.search).toMatchObject({ before: 1, after: 2 });
  await vi.waitFor(() => expect(against()).toEqual([null, "1"]));
  expect(await within(section).findByText(/"lr": 0.01/)).toBeInTheDocument();
});

it("shows the whole configuration of the only attempt", async () => {
  serve({
    ...ANSWERS,
    [`GET ${RUN}`]: () => ({ ...ANSWERS[`GET ${RUN}`](), latest_attempt: 1 }),
    [`GET ${RUN}/attempts/1/config`]: () => ({
      ...{ attempt: 1, config: { seed: 7 }, compared_with: null, differences: [], differences_left_out: 0 },
    }),
  });
  open("/ui/runs/llama?project=demo");
  expect(await screen.findByText(/"seed": 7/)).toBeInTheDocument();
  expect(screen.getByText("There is one attempt")).toBeVisible();
});

it("asks for no configuration before the first attempt", async () => {
  const asked = serve({ ...ANSWERS, [`GET ${RUN}`]: () => ({ ...ANSWERS[`GET ${RUN}`](), latest_attempt: 0 }) });
  open("/ui/runs/llama?project=demo");
  const section = await screen.findByRole("region", { name: "Differences between attempts" });
  expect(within(section).getByText("No attempt yet")).toBeVisible();
  expect(asked.filter(({ url }) => url.includes("/config"))).toEqual([]);
});

it("finds the best checkpoint of a time", async () => {
  const asked = serve(ANSWERS);
  const router = open("/ui/runs/llama?project=demo&since=2026-01-01T00:00:00Z");
  const section = await screen.findByRole("region", { name: "Checkpoints" });
  const least = await within(section).findByText(/^Least loss/);
  expect(least).toHaveTextContent("Least loss: 1.5 at step 200 #2; greatest: 2.5 at step 100 #1");
  expect(within(section).getByRole("columnheader", { name: "loss" })).toBeVisible();
  const given = asked.map(({ url }) => new URL(url).searchParams);
  expect(given.some((each) => each.get("committed_since") === "2026-01-01T00:00:00.000Z")).toBe(true);
  await userEvent.click(within(section).getByRole("button", { name: "Show all" }));
  expect(router.state.location.searchStr).not.toContain("since");
});

it("keeps the exact moment of a link until another day is chosen", async () => {
  serve(ANSWERS);
  const router = open("/ui/runs/llama?project=demo&since=2026-01-05T10:20:30Z");
  const section = await screen.findByRole("region", { name: "Checkpoints" });
  await userEvent.type(within(section).getByLabelText("Label"), "best");
  await userEvent.click(within(section).getByRole("button", { name: "Filter" }));
  expect(router.state.location.search).toMatchObject({ label: "best", since: "2026-01-05T10:20:30.000Z" });
  fireEvent.change(within(section).getByLabelText("Committed from"), { target: { value: "2026-01-07" } });
  await userEvent.click(within(section).getByRole("button", { name: "Filter" }));
  expect(router.state.location.search).toMatchObject({ since: new Date("2026-01-07T00:00").toISOString() });
});

it("says where the time went and how often to save, and keeps the rest when one of them fails", async () => {
  serve({ ...ANSWERS, [`GET ${RUN}/advice`]: () => problem(500, "internal", "The catalog did not answer.") });
  open("/ui/runs/llama?project=demo");
  const section = await screen.findByRole("region", { name: "Goodput and what was lost" });
  expect(await within(section).findByRole("row", { name: /in steps that were lost 10 s 10.0 %/ })).toBeInTheDocument();
  expect(await within(section).findByRole("alert")).toHaveTextContent("The catalog did not answer.");
});

it("draws what the run was hour by hour, with gaps where it was not live", async () => {
  const sample = (since: string, more: object) => ({
    ...{ since, missed_hours: 0, productive_seconds: 1800, wall_seconds: 3600, goodput: 0.5, ...more },
  });
  const asked = serve({
    ...ANSWERS,
    [`GET ${RUN}/samples`]: () =>
      page(
        sample("2026-01-01T05:00:00Z", { logical_bytes: 4096, restore_point_age_seconds: 600, missed_hours: 1 }),
        sample("2026-01-01T02:00:00Z", { logical_bytes: 2048, restore_point_age_seconds: 7200, goodput: null }),
        sample("2026-01-01T01:00:00Z", { logical_bytes: 1024, restore_point_age_seconds: null }),
      ),
  });
  open("/ui/runs/llama?project=demo");
  const section = within(await screen.findByRole("region", { name: "Hour by hour" }));
  expect(await section.findByText("50.0 % of the time")).toBeVisible();
  expect(section.getByText("4.0 KiB, +3.0 KiB")).toBeVisible();
  expect(section.getByText("2 h at most")).toBeVisible();
  expect(section.getByText(/no samples in 1 hour of/)).toBeVisible();
  const drawn = (title: string) =>
    within(section.getByRole("table", { name: title, hidden: true }))
      .getAllByRole("cell", { hidden: true })
      .map((each) => each.textContent);
  expect(drawn("Goodput by the hour")).toEqual(["50.0 %", "–", "–", "50.0 %"]);
  expect(drawn("Bytes by the hour")).toEqual(["1.0 KiB", "2.0 KiB", "–", "4.0 KiB"]);
  expect(drawn("Age of the restore point")).toEqual(["–", "2 h", "–", "10 min"]);
  const list = asked.find(({ url }) => url.includes("/samples"));
  expect(new URL(list?.url ?? "").searchParams.get("limit")).toBe("168");
});

it("says that the run has no sample yet, and where its cost is", async () => {
  serve(ANSWERS);
  open("/ui/runs/llama?project=demo");
  const section = within(await screen.findByRole("region", { name: "Hour by hour" }));
  expect(await section.findByText("There is no sample yet")).toBeVisible();
  expect(section.getByRole("link", { name: "what it costs now" })).toHaveAttribute(
    "href",
    expect.stringMatching(/^\/ui\/retention\?.*run=llama/),
  );
});

it("filters the checkpoints by the address", async () => {
  serve(ANSWERS);
  const router = open("/ui/runs/llama?project=demo");
  await userEvent.selectOptions(await screen.findByLabelText("Health"), "diverged");
  expect(router.state.location.search).toMatchObject({ health: "diverged" });
  const list = await screen.findByRole("grid", { name: "Checkpoints" });
  expect(await within(list).findByRole("link", { name: "300" })).toBeVisible();
  expect(within(list).queryByRole("link", { name: "200" })).toBeNull();
});

it("says what to do where the project has no such run", async () => {
  serve({
    ...ANSWERS,
    [`GET ${RUN}`]: () => problem(404, "run_not_found", "demo has no run llama."),
    "GET /v1/projects/demo/runs": () => page({ name: "vit", in_trash: IN_TRASH }),
  });
  open("/ui/runs/llama?project=demo");
  expect(await screen.findByRole("alert")).toHaveTextContent("demo has no run llama.");
  expect(screen.getByRole("link", { name: "runs of demo" })).toHaveAttribute("href", "/ui/runs?project=demo");
});

/** A service whose run can be deleted and taken back. */
function deletable(more: Parameters<typeof serve>[0] = {}) {
  const state = { isDeleted: false, etag: '"run-1"', checkpoints: 3, sent: [] as unknown[] };
  const gone = () => problem(404, "run_not_found", "demo/llama was deleted by ops (a failed idea).");
  const answers: Parameters<typeof serve>[0] = {
    ...ANSWERS,
    [`GET ${RUN}`]: () => (state.isDeleted ? gone() : ANSWERS[`GET ${RUN}`]()),
    "GET /v1/projects/demo/runs": () => page({ name: "llama", in_trash: IN_TRASH }),
    [`DELETE ${RUN}`]: async (request) => {
      const { dry_run, reason } = await request.json();
      const seen = request.headers.get("If-Match");
      if (!dry_run) state.sent.push([seen, reason]);
      if (!dry_run && seen !== state.etag) return problem(412, "edit_conflict", "The run was changed. Look again.");
      state.isDeleted = !dry_run;
      const freed = { bytes: 2 ** 21, by_store: { "posix:///s": 2 ** 21 } };
      const told = { etag: state.etag, checkpoints: state.checkpoints, logical_bytes: 3 * 2 ** 20, freed };
      return { project: "demo", run: "llama", dry_run, ...told, in_trash: dry_run ? null : IN_TRASH };
    },
    [`POST ${RUN}/undelete`]: () => {
      state.isDeleted = false;
      return { project: "demo", run: "llama", checkpoints: 2, purged: 1 };
    },
    ...more,
  };
  serve(answers);
  return state;
}

it("deletes a run by its name, as its dry run was seen, and takes it back", async () => {
  const state = deletable();
  open("/ui/runs/llama?project=demo");
  await userEvent.click(await screen.findByRole("button", { name: "Delete run" }));
  const typed = await screen.findByLabelText("Type llama to go on");
  const dialog = within(screen.getByRole("dialog", { name: "Delete llama?" }));
  expect(dialog.getByText(/3 checkpoints go to the trash with the run: 3.0 MiB of states/)).toBeVisible();
  expect(dialog.getByText(/frees 2.0 MiB, net of what other runs share: 2.0 MiB in posix:/)).toBeVisible();
  expect(dialog.getByRole("button", { name: "Delete the run" })).toBeDisabled();
  Object.assign(state, { etag: '"run-2"', checkpoints: 4 });
  await userEvent.type(dialog.getByLabelText(/^Why/), " a failed idea ");
  await userEvent.type(typed, "llama");
  await userEvent.click(dialog.getByRole("button", { name: "Delete the run" }));
  expect(await dialog.findByText(/^checkpoints/)).toHaveTextContent("checkpoints: 3 → became 4");
  expect(state.isDeleted).toBe(false);
  await userEvent.click(dialog.getByRole("button", { name: "Reload, and go on from there" }));
  await userEvent.click(dialog.getByRole("button", { name: "Delete the run" }));
  expect(await screen.findByText(/ops deleted this run: a failed idea/)).toHaveTextContent(/taken back until .*2999/);
  expect(screen.queryByRole("region", { name: "Restore point" })).toBeNull();
  expect(state.sent).toEqual([
    ['"run-1"', "a failed idea"],
    ['"run-2"', "a failed idea"],
  ]);

  await userEvent.click(screen.getByRole("button", { name: "Take the run back" }));
  expect(await screen.findByText(/The run is back, and 2 checkpoints are committed again/)).toHaveTextContent(
    "The purge of 1 other had begun",
  );
  expect(await screen.findByRole("region", { name: "Restore point" })).toBeVisible();
});

it("offers to take a deleted run back where a link leads to it", async () => {
  const state = deletable();
  state.isDeleted = true;
  open("/ui/runs/llama?project=demo");
  await userEvent.click(await screen.findByRole("button", { name: "Take the run back" }));
  expect(await screen.findByRole("region", { name: "Restore point" })).toBeVisible();
  expect(screen.queryByRole("button", { name: "Take the run back" })).toBeNull();
});

it("says which checkpoints hold a run back, and what else does", async () => {
  const reasons = [{ kind: "pinned", detail: "pinned by ana: figure 3" }];
  const kept = [{ checkpoint_id: "ck-2-200", step: 200, attempt: 2, reasons }];
  const answers = [
    problem(409, "checkpoint_protected", "Nothing was deleted.", { checkpoints: kept, count: 3 }),
    problem(409, "checkpoint_protected", "An attempt of this run is active."),
  ];
  deletable({ [`DELETE ${RUN}`]: () => answers.shift() });
  open("/ui/runs/llama?project=demo");
  await userEvent.click(await screen.findByRole("button", { name: "Delete run" }));
  const alert = await screen.findByRole("alert");
  expect(
    within(alert)
      .getAllByRole("listitem")
      .map((each) => each.textContent),
  ).toEqual(["step 200 of attempt 2: pinned by ana: figure 3", "and 2 others"]);
  expect(within(alert).getByRole("link", { name: "step 200 of attempt 2" })).toHaveAttribute(
    "href",
    "/ui/checkpoints/ck-2-200?project=demo",
  );
  await userEvent.click(within(alert).getByRole("button", { name: "Look again" }));
  expect(await screen.findByText("An attempt of this run is active.")).toBeVisible();
  expect(screen.queryByLabelText("Type llama to go on")).toBeNull();
});

it("lets a token without the scope delete no run, and says why", async () => {
  deletable({ "GET /v1/sessions/current": () => ({ ...SESSION, scopes: ["read"] }) });
  open("/ui/runs/llama?project=demo");
  const button = await screen.findByRole("button", { name: "Delete run" });
  expect(button).toHaveAttribute("aria-disabled", "true");
  await userEvent.click(button);
  expect(screen.queryByRole("dialog")).toBeNull();
});
