import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { openPage, problem, SESSION, serve } from "@/testing/page";

type Answers = Parameters<typeof serve>[0];

const page = (...items: unknown[]) => ({ items, next_cursor: null });
const run = (name: string, tags: string[]) => ({ id: name, project: "demo", name, tags, status: "finished" });
const body = async (request: Request | undefined) => JSON.parse((await request?.clone().text()) ?? "null");

/** What the service finds in a run of so many checkpoints that match, and what a prune of some of them does. */
async function pruned(request: Request, name: string, count: number) {
  const { dry_run, checkpoint_ids } = await body(request);
  const ids: string[] = checkpoint_ids ?? Array.from({ length: count }, (_, at) => `ck_${name}_${at + 1}`);
  const reasons = [{ kind: "pinned", detail: "pinned by ana: figure 3" }];
  return {
    dry_run,
    trashed: ids.map((id, at) => ({ checkpoint_id: id, step: at + 1, attempt: 1, health: "ok", logical_bytes: 100 })),
    left: dry_run && name === "vit" ? [{ checkpoint_id: "ck_vit_9", step: 9, attempt: 1, reasons }] : [],
    purge_at: "2999-01-01T00:00:00Z",
    freed: { bytes: ids.length * 2 ** 30, by_store: { "posix:///s": ids.length * 2 ** 30 } },
  };
}

/** Three runs; of llama 3 checkpoints match, of vit 2, of bert none. `vit`: answers in its place. */
function open(
  search: string,
  vit: (request: Request) => unknown = (request) => pruned(request, "vit", 2),
  more: Answers = {},
) {
  const answers: Answers = {
    "GET /v1/sessions/current": () => SESSION,
    "GET /v1/projects": () => page({ id: "1", name: "demo", quota_bytes: null, stored_bytes: 0, runs: 3 }),
    "GET /v1/projects/demo/runs": () => page(run("llama", ["paper"]), run("vit", ["paper"]), run("bert", [])),
    "POST /v1/projects/demo/runs/llama/retention/prune": (request) => pruned(request, "llama", 3),
    "POST /v1/projects/demo/runs/vit/retention/prune": vit,
    "POST /v1/projects/demo/runs/bert/retention/prune": (request) => pruned(request, "bert", 0),
    "GET /v1/projects/demo/cost": () => problem(403, "forbidden", "No costs."),
    "GET /v1/projects/demo/usage": () => problem(403, "forbidden", "No usage."),
    ...more,
  };
  const asked = serve(answers);
  const router = openPage(`/ui/retention?view=prune${search}`);
  return { asked, router };
}

const figure = (name: string) => screen.getByText(name, { selector: "dt" }).parentElement as HTMLElement;
const rows = (name: string) =>
  within(screen.getByRole("grid", { name }))
    .getAllByRole("row")
    .slice(1)
    .map((row) =>
      within(row)
        .getAllByRole("gridcell")
        .map((each) => each.textContent),
    );

it("has one dry run over the runs that match, and loses nothing when one of them fails", async () => {
  let release = () => {};
  const held = new Promise<void>((resolve) => {
    release = resolve;
  });
  let isActive = true;
  const { asked, router } = open("", async (request) => {
    if ((await body(request)).dry_run) return pruned(request, "vit", 2);
    await held;
    return isActive ? problem(409, "checkpoint_protected", "An attempt has begun.") : pruned(request, "vit", 2);
  });
  await userEvent.type(await screen.findByLabelText("Runs with the tag"), "paper");
  await userEvent.type(screen.getByLabelText("Before step"), "50");
  await userEvent.click(screen.getByRole("button", { name: "Show what matches" }));
  await screen.findByRole("region", { name: "What would expire" });
  expect(router.state.location.search).toEqual({
    project: "demo",
    view: "prune",
    filter: { before_step: 50 },
    runs: { tag: "paper" },
  });
  expect(figure("Runs chosen")).toHaveTextContent("2 of 2");
  expect(figure("Bytes freed, at least")).toHaveTextContent("5.0 GiB");
  expect(rows("Checkpoints that would expire").map(([name, step, , why]) => [name, step, why])).toEqual([
    ...["1", "2", "3"].map((step) => ["llama", step, "before step 50"]),
    ...["1", "2"].map((step) => ["vit", step, "before step 50"]),
  ]);
  expect(rows("Checkpoints that are kept")).toEqual([["vit", "9", "1", "pinned by ana: figure 3"]]);
  expect(asked.some((each) => each.url.includes("/bert/"))).toBe(false);

  await userEvent.click(screen.getByRole("button", { name: "Move 5 to the trash" }));
  const dialog = within(screen.getByRole("dialog", { name: "Prune 2 runs of demo" }));
  expect(dialog.getByText(/then the next collection frees at least 5.0 GiB/)).toBeVisible();
  expect(dialog.getByText("Filter: before step 50.")).toBeVisible();
  await userEvent.type(dialog.getByLabelText(/^Why/), "a sweep");
  await userEvent.type(dialog.getByLabelText("Type 5 to go on"), "5");
  await userEvent.click(dialog.getByRole("button", { name: "Move 5 to the trash" }));
  expect(await dialog.findByText("1 of 2 runs done")).toBeVisible();
  expect(dialog.getAllByRole("listitem").map((each) => each.textContent)).toEqual([
    "llama: 3 of 3 done",
    "vit: 0 of 2 done",
  ]);
  release();
  expect(await screen.findByText("3 checkpoints went to the trash.")).toBeVisible();
  expect(screen.getByText("vit, 2 checkpoints: An attempt has begun.")).toBeVisible();

  isActive = false;
  await userEvent.click(screen.getByRole("button", { name: "Retry what failed" }));
  expect(await screen.findByText("5 checkpoints went to the trash.")).toBeVisible();
  const bodies = await Promise.all(asked.filter((each) => each.url.endsWith("/prune")).map(body));
  const real = bodies.filter((each) => !each.dry_run);
  expect(real.map((each) => each.checkpoint_ids.length)).toEqual([3, 2, 2]);
  for (const each of real)
    expect(each).toMatchObject({ filter: { before_step: 50 }, all_of_run: false, reason: "a sweep" });
});

it("says what a call whose reply was lost may have moved", async () => {
  let isLost = true;
  open("&filter={}", async (request) => {
    const found = await pruned(request, "vit", 2);
    if (found.dry_run) return found;
    // The service has done it, and names it in no second reply.
    if (!isLost) return { ...found, trashed: [], purge_at: null, freed: { bytes: 0 } };
    isLost = false;
    throw new TypeError("Failed to fetch");
  });
  await userEvent.click(await screen.findByRole("button", { name: "Move 5 to the trash" }));
  await userEvent.type(screen.getByLabelText("Type 5 to go on"), "5");
  await userEvent.click(within(screen.getByRole("dialog")).getByRole("button", { name: "Move 5 to the trash" }));
  const told = "The service has not confirmed that 2 checkpoints went to the trash:";
  expect(await screen.findByText(told)).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Retry what failed" }));
  expect(await screen.findByText(/^2 checkpoints are in the trash already, or no longer match/)).toBeVisible();
  expect(screen.getByText("3 checkpoints went to the trash.")).toBeVisible();
  expect(screen.queryByText(told)).toBeNull();
});

it("says of which run there is no dry run, and goes on with the others alone", async () => {
  const { asked } = open("&filter={}", () => problem(409, "checkpoint_protected", "An attempt of it is active."));
  const alert = await screen.findByRole("alert");
  expect(alert).toHaveTextContent("Of 1 run the service made no dry run.");
  expect(within(alert).getByRole("listitem")).toHaveTextContent("vit: An attempt of it is active.");
  expect(figure("Runs chosen")).toHaveTextContent("1 of 1");
  // Of one run the figure is no bound.
  expect(figure("Bytes freed")).toHaveTextContent("3.0 GiB");
  expect(rows("Runs that have what would expire").map((cells) => cells.slice(1, 4))).toEqual([["llama", "3", "0"]]);
  expect(asked.filter((each) => each.url.endsWith("/prune"))).toHaveLength(3);
});

it("looks again into the runs alone of which there was no dry run", async () => {
  let isActive = true;
  const { asked } = open("&filter={}", (request) =>
    isActive ? problem(409, "checkpoint_protected", "An attempt of it is active.") : pruned(request, "vit", 2),
  );
  await screen.findByRole("alert");
  isActive = false;
  await userEvent.click(screen.getByRole("button", { name: "Look again" }));
  await waitFor(() => expect(screen.queryByRole("alert")).toBeNull());
  // What was not seen at the first look is not chosen.
  expect(figure("Runs chosen")).toHaveTextContent("1 of 2");
  const runs = asked.filter((each) => each.url.endsWith("/prune")).map((each) => each.url.split("/").at(-3));
  expect(runs.sort()).toEqual(["bert", "llama", "vit", "vit"]);
});

it("takes a run out of what is chosen, and opens one to choose among its checkpoints", async () => {
  const { router } = open("&filter={}");
  const table = await screen.findByRole("grid", { name: "Runs that have what would expire" });
  await userEvent.click(within(table).getAllByRole("checkbox", { name: "Select" })[0] as HTMLElement);
  await waitFor(() => expect(figure("Runs chosen")).toHaveTextContent("1 of 2"));
  expect(screen.getByRole("button", { name: "Move 2 to the trash" })).toBeVisible();
  await userEvent.click(screen.getByRole("link", { name: "Choose among the checkpoints of vit" }));
  expect(await screen.findByText("2 of 2")).toBeVisible();
  expect(router.state.location.search).toEqual({ project: "demo", view: "prune", filter: {}, run: "vit" });
});

it("has in its fields what is shown, also when the address goes back", async () => {
  const { router } = open("&filter={}");
  const all = () => screen.getByLabelText(/^Also the last points/);
  await screen.findByRole("region", { name: "What would expire" });
  await userEvent.click(all());
  await userEvent.click(screen.getByRole("button", { name: "Show what matches" }));
  await waitFor(() => expect(router.state.location.search).toHaveProperty("allOfRun", true));
  expect(all()).toBeChecked();
  router.history.back();
  await waitFor(() => expect(all()).not.toBeChecked());
});

it("tells the prices beside the cost", async () => {
  const cost = { per_month: 3, currency: "USD", as_of: "2026-03-01", unpriced_bytes: 0, lines: [] };
  open("&filter={}", undefined, { "GET /v1/projects/demo/cost": () => cost });
  expect(await screen.findByText("Prices as of 2026-03-01")).toBeVisible();
});

it("says that no run matches, and asks the service nothing", async () => {
  const { asked } = open(`&filter={}&runs=${encodeURIComponent('{"name":"gpt"}')}`);
  expect(await screen.findByText("No run matches")).toBeVisible();
  expect(asked.some((each) => each.url.endsWith("/prune"))).toBe(false);
});
