import { act, fireEvent, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { openPage, problem, SESSION, serve } from "@/testing/page";
import { ANSWERS, ATTEMPTS, attempt, checkpoint, history, IN_TRASH, page, RUN } from "./examples";

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

it("says from which checkpoint of another run it was forked", async () => {
  const forked_from = { project: "demo", run: "base", checkpoint_id: "ck-9", attempt: 1, step: 900, saved_in: "base" };
  serve({
    ...ANSWERS,
    [`GET ${RUN}`]: () => ({ ...ANSWERS[`GET ${RUN}`](), forked_from }),
    "GET /v1/checkpoints/ck-9": () => checkpoint(1, 900, { run: "base" }),
  });
  openPage("/ui/runs/llama?project=demo");
  expect(await screen.findByRole("link", { name: "demo/base@900#1" })).toHaveAttribute(
    "href",
    expect.stringContaining("ck-9"),
  );
});

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
  openPage("/ui/runs/llama?project=demo");
  expect(await screen.findByText("Twice the data.")).toBeVisible();
  expect(screen.getByRole("link", { name: "paper" })).toHaveAttribute("href", "/ui/runs?project=demo&tag=paper");
  await userEvent.click(screen.getByRole("button", { name: "Edit the tags and the note" }));
  const dialog = within(screen.getByRole("dialog", { name: "Tags and note of llama" }));
  expect(dialog.getByLabelText("Note")).toHaveValue("Twice the data.");
  await userEvent.type(dialog.getByLabelText(/^Tags/), " baseline");
  Object.assign(now, { etag: '"2"', tags: ["paper", "frozen"], note: "Half the data." });
  await userEvent.click(dialog.getByRole("button", { name: "Save" }));
  expect(await dialog.findByText(/^note/)).toHaveTextContent("note: Twice the data. → became Half the data.");
  await userEvent.click(dialog.getByRole("button", { name: "Reload, and go on from there" }));
  await userEvent.click(dialog.getByRole("button", { name: "Save" }));
  await vi.waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  // The note is the other person's: it was left alone here. So is the tag that this person never saw.
  expect(sent).toEqual([
    ['"1"', { tags: ["paper", "baseline"] }],
    ['"2"', { tags: ["paper", "frozen", "baseline"] }],
  ]);
  expect(await screen.findByText("Half the data.")).toBeVisible();
});

it("lets a token without the scope edit no tags", async () => {
  serve({ ...ANSWERS, "GET /v1/sessions/current": () => ({ ...SESSION, scopes: ["read"] }) });
  openPage("/ui/runs/llama?project=demo");
  const button = await screen.findByRole("button", { name: "Edit the tags and the note" });
  expect(button).toHaveAttribute("aria-disabled", "true");
});

it("tells the restore point, and why nothing newer is one", async () => {
  serve(ANSWERS);
  openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
  const figure = (await screen.findByText("Last step")).parentElement;
  expect(figure).toHaveTextContent("300");
  last_step = 345;
  await pass(30_000);
  await vi.waitFor(() => expect(figure).toHaveTextContent("345"));
});

it("asks again for the restore point as time goes by", async () => {
  stopTheClock();
  const path = `GET ${RUN}/restore-point`;
  let note = "";
  serve({ ...ANSWERS, [path]: () => ({ ...ANSWERS[path]?.(), note }) });
  openPage("/ui/runs/llama?project=demo");
  const section = within(await screen.findByRole("region", { name: "Restore point" }));
  expect(await section.findByRole("link", { name: "200" })).toBeVisible();
  note = "The catalog was rebuilt, and something may be missing.";
  await pass(60_000);
  expect(await section.findByText(note)).toBeVisible();
});

it("sees a launch after the last attempt has ended", async () => {
  stopTheClock();
  const ended = attempt(1, { last_step: 150, outcome: "failed", ended_at: "2026-01-01T02:00:00Z" });
  const known = [ended];
  serve({ ...ANSWERS, [`GET ${RUN}/attempts`]: () => page(...known) });
  openPage("/ui/runs/llama?project=demo");
  const table = await screen.findByRole("grid", { name: "Attempts" });
  known.unshift(attempt(2));
  await pass(60_000);
  expect(await within(table).findByRole("link", { name: "#2" })).toBeVisible();
});

it("keeps the plot, with its cursor, when a heartbeat brings nothing to draw", async () => {
  let told = {};
  serve({ ...ANSWERS, [`GET ${RUN}/attempts`]: () => page({ ...ATTEMPTS[0], ...told }, ATTEMPTS[1]) });
  openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
  const curve = await screen.findByRole("figure", { name: "loss over steps" });
  await userEvent.click(within(curve).getByText("loss over steps as a table"));
  expect(within(curve).getByRole("row", { name: "200 1.5" })).toBeInTheDocument();
});

it("draws what the jobs measured at each step, with the checkpoints on it", async () => {
  const curves = { loss: { 199: 1.6, 200: 1.5, 201: 9, 202: "nan" as const } };
  const asked = serve({ ...ANSWERS, [`GET ${RUN}/metrics-history`]: history(curves) });
  openPage("/ui/runs/llama?project=demo&from=150&to=300");
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
  openPage("/ui/runs/llama?project=demo");
  const curve = await screen.findByRole("figure", { name: "loss over steps" });
  await userEvent.click(within(curve).getByText("loss over steps as a table"));
  const branch = "loss, attempt 1, not on the lineage";
  expect(await within(curve).findByRole("columnheader", { name: branch })).toBeVisible();
  expect(within(curve).getByRole("row", { name: "101 2.4 – 7" })).toBeInTheDocument();
  const left = asked.map(({ url }) => new URL(url).searchParams).find((each) => each.has("attempt"));
  expect([left?.get("attempt"), left?.get("from_step")]).toEqual(["1", "101"]);
  // The extremes are those of what the run has.
  expect(screen.getByText(/^Least 1.5 at step 200, greatest 2.5 at step 100/)).toBeVisible();
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
  const router = openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
  expect(await screen.findByRole("figure", { name: "loss over steps" })).toBeInTheDocument();
  const section = screen.getByRole("region", { name: "Attempts over steps" });
  expect(await within(section).findByRole("alert")).toHaveTextContent("The catalog did not answer.");
});

it("says how to give metrics where there are none", async () => {
  serve({ ...ANSWERS, [`GET ${RUN}/checkpoints`]: () => page(checkpoint(1, 100)) });
  openPage("/ui/runs/llama?project=demo");
  expect(await screen.findByText(/No metric of this run is known/)).toHaveTextContent(
    "ckpt.step(step, state, metrics=…)",
  );
  expect(screen.queryByLabelText("Metric")).toBeNull();
});

it("compares two attempts, which stand in the address", async () => {
  const asked = serve(ANSWERS);
  const against = () =>
    asked.filter(({ url }) => url.includes("/config")).map(({ url }) => new URL(url).searchParams.get("against"));
  const router = openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
  expect(await screen.findByText(/"seed": 7/)).toBeInTheDocument();
  expect(screen.getByText("There is one attempt")).toBeVisible();
});

it("asks for no configuration before the first attempt", async () => {
  const asked = serve({ ...ANSWERS, [`GET ${RUN}`]: () => ({ ...ANSWERS[`GET ${RUN}`](), latest_attempt: 0 }) });
  openPage("/ui/runs/llama?project=demo");
  const section = await screen.findByRole("region", { name: "Differences between attempts" });
  expect(within(section).getByText("No attempt yet")).toBeVisible();
  expect(asked.filter(({ url }) => url.includes("/config"))).toEqual([]);
});

it("finds the best checkpoint of a time", async () => {
  const asked = serve(ANSWERS);
  const router = openPage("/ui/runs/llama?project=demo&since=2026-01-01T00:00:00Z");
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
  const router = openPage("/ui/runs/llama?project=demo&since=2026-01-05T10:20:30Z");
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
  openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
  const section = within(await screen.findByRole("region", { name: "Hour by hour" }));
  expect(await section.findByText("There is no sample yet")).toBeVisible();
  expect(section.getByRole("link", { name: "what it costs now" })).toHaveAttribute(
    "href",
    expect.stringMatching(/^\/ui\/retention\?.*run=llama/),
  );
});

it("filters the checkpoints by the address", async () => {
  serve(ANSWERS);
  const router = openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
  expect(await screen.findByRole("alert")).toHaveTextContent("demo has no run llama.");
  expect(screen.getByRole("link", { name: "runs of demo" })).toHaveAttribute("href", "/ui/runs?project=demo");
});
