import { screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { openPage, problem, SESSION, serve } from "@/testing/page";

const page = (...items: unknown[]) => ({ items, next_cursor: null });
const RUN = {
  id: "r1",
  project: "demo",
  name: "llama",
  committed_checkpoints: 3,
  logical_bytes: 300,
  deduplicated_bytes: 0,
};
const POLICY = {
  kind: "retention",
  project: "demo",
  run: null,
  level: "project",
  document: { keep_last: 2 },
  version: 4,
  etag: '"4"',
  updated_at: "2026-01-01T00:00:00Z",
  updated_by: "ops",
};
const USAGE = {
  project: "demo",
  run: null,
  at: "2026-01-01T00:00:00Z",
  stored_bytes: 3 * 2 ** 30,
  trashed_bytes: 0,
  logical_bytes: 300,
  stores: [{ store: "primary", store_kind: "posix", store_url: "posix:///s", storage_class: null }],
};
const COST = {
  project: "demo",
  run: null,
  per_month: 3,
  currency: "USD",
  as_of: "2026-01-01",
  unpriced_bytes: 0,
  lines: [
    {
      store: "primary",
      store_kind: "posix",
      storage_class: null,
      stored_bytes: 3 * 2 ** 30,
      per_gib_month: 1,
      per_month: 3,
    },
  ],
};
const FORECAST = {
  per_month: 9,
  currency: "USD",
  kept_checkpoints: 7,
  grows_per_month: 0,
  unpriced_bytes: 0,
  limits: [],
};
const ids = (count: number) => Array.from({ length: count }, (_, index) => `ck_${index + 1}`);

/** The newest `kept` of three are kept. */
function plan(kept: number, policy: object, digest: string | null, run = "llama") {
  const checkpoints = ids(3).map((checkpoint_id, index) => ({
    checkpoint_id: run === "llama" ? checkpoint_id : `${run}_${checkpoint_id}`,
    step: (3 - index) * 10,
    attempt: 1,
    at: "2026-01-01T00:00:00Z",
    state: "committed",
    health: "ok",
    labels: [],
    logical_bytes: 100,
    keep: index < kept,
    reasons: [
      index < kept
        ? { kind: "keep_last", detail: `number ${index + 1} of the newest ${kept}` }
        : { kind: "no_rule", detail: "no rule keeps it" },
    ],
  }));
  const expired = 3 - kept;
  const freed = { bytes: expired * 2 ** 30, by_store: { "posix:///s": expired * 2 ** 30 } };
  return {
    project: "demo",
    run,
    policy,
    policy_digest: digest,
    rules: {},
    kept,
    expired,
    freed,
    notes: [],
    checkpoints,
  };
}

const body = async (request: Request | undefined) => JSON.parse((await request?.clone().text()) ?? "null");
const trashed = (ids: string[]) =>
  ids.map((checkpoint_id) => ({ checkpoint_id, step: 1, attempt: 1, health: "ok", logical_bytes: 100 }));

function answers(more: Parameters<typeof serve>[0] = {}): Parameters<typeof serve>[0] {
  const put: { document?: unknown } = {};
  const own = () => ({ ...POLICY, run: "llama", level: "run", document: put.document, version: 1, etag: '"1"' });
  return {
    "GET /v1/sessions/current": () => SESSION,
    "GET /v1/projects": () => page({ id: "1", name: "demo", quota_bytes: null, stored_bytes: 0, runs: 1 }),
    "GET /v1/projects/demo/runs": () => page(RUN),
    "GET /v1/projects/demo/policies/retention": () => POLICY,
    "GET /v1/projects/demo/runs/llama/policies/retention": () => (put.document ? own() : POLICY),
    "PUT /v1/projects/demo/runs/llama/policies/retention": async (request) => {
      put.document = (await body(request)).document;
      return own();
    },
    "POST /v1/projects/demo/runs/llama/retention/plan": async (request) => {
      const { policy } = await body(request);
      if (typeof policy?.keep_last === "string")
        return problem(400, "invalid_request", "keep_last: it must be a number.");
      // Between two keys the field may be empty: then there is no rule.
      const document = policy ?? put.document ?? POLICY.document;
      return plan(document.keep_last ?? 3, put.document ? own() : POLICY, policy ? null : "digest");
    },
    "POST /v1/projects/demo/runs/llama/retention/apply": async (request) => ({
      dry_run: false,
      trashed: trashed((await body(request)).checkpoint_ids),
      left: [],
      purge_at: "2999-01-01T00:00:00Z",
      freed: { bytes: 2 * 2 ** 30 },
    }),
    "POST /v1/projects/demo/runs/llama/cost/forecast": () => FORECAST,
    "GET /v1/projects/demo/runs/llama/cost": () => ({ ...COST, run: "llama" }),
    "GET /v1/projects/demo/runs/llama/usage": () => ({ ...USAGE, run: "llama" }),
    "GET /v1/projects/demo/cost": () => COST,
    "GET /v1/projects/demo/usage": () => USAGE,
    ...more,
  };
}

const open = (search: string) => openPage(`/ui/retention${search}`);

const figure = (name: string) => screen.getByText(name).parentElement as HTMLElement;

it("shows at once what an edited policy does, and applies what was seen by its typed count", async () => {
  const asked = serve(
    answers({ "POST /v1/checkpoints/ck_2/undelete": () => ({}), "POST /v1/checkpoints/ck_3/undelete": () => ({}) }),
  );
  const router = open("?run=llama");
  expect(await screen.findByText(/The project’s policy holds for this run/)).toBeVisible();
  const newest = await screen.findByLabelText("Newest");
  expect(newest).toHaveValue("2");

  await userEvent.clear(newest);
  await userEvent.type(newest, "1");
  expect(await screen.findByRole("button", { name: "Save the policy and expire 2" })).toBeEnabled();
  expect(router.state.location.search).toMatchObject({ run: "llama", draft: { keep_last: 1 } });
  expect(figure("Bytes freed")).toHaveTextContent("2.0 GiB");
  await waitFor(() => expect(figure("Cost a month, once it is freed")).toHaveTextContent("1.00 USD"));
  const table = screen.getByRole("grid", { name: /Checkpoints of llama/ });
  expect(within(table).getAllByText("no rule keeps it")).toHaveLength(2);
  expect(within(table).getByText("number 1 of the newest 1")).toBeVisible();

  await userEvent.click(screen.getByRole("button", { name: "Save the policy and expire 2" }));
  await userEvent.type(screen.getByLabelText("Type 2 to go on"), "2");
  await userEvent.click(screen.getByRole("button", { name: "Expire 2" }));
  expect(await screen.findByText("The policy is saved. 2 checkpoints went to the trash.")).toBeVisible();
  const put = asked.find((each) => each.method === "PUT");
  // The run had no policy of its own: there is no version to name.
  expect(put?.headers.get("If-Match")).toBeNull();
  expect(await body(put)).toEqual({ document: { keep_last: 1 } });
  const applied = asked.find((each) => each.url.endsWith("/retention/apply"));
  expect(await body(applied)).toEqual({ policy_digest: "digest", checkpoint_ids: ["ck_2", "ck_3"] });
  expect(router.state.location.search).not.toHaveProperty("draft");

  await userEvent.click(screen.getByRole("button", { name: "Undo: take all 2 back" }));
  expect(await screen.findByText(/2 checkpoints are committed again/)).toBeVisible();
});

it("tells of a forecast how many bytes have no price", async () => {
  const forecast = { ...FORECAST, unpriced_bytes: 2 * 2 ** 30 };
  serve(answers({ "POST /v1/projects/demo/runs/llama/cost/forecast": () => forecast }));
  open("?run=llama");
  expect(await screen.findByText(/without a price: holdfast prices sets one/)).toHaveTextContent("2.0 GiB");
});

it("names the version of the project's policy that was seen, and shows what the service refuses", async () => {
  let status = 412;
  const asked: Request[] = serve(
    answers({
      "PUT /v1/projects/demo/policies/retention": () =>
        status === 412 ? problem(412, "edit_conflict", "It was changed since it was read.") : POLICY,
      // Somebody puts another one while the dialog is open.
      "GET /v1/projects/demo/policies/retention": () =>
        asked.some((each) => each.method === "PUT")
          ? { ...POLICY, document: { keep_last: 7 }, version: 5, etag: '"5"' }
          : POLICY,
    }),
  );
  open("?draft=%7B%22keep_last%22%3A3%7D");
  await userEvent.click(await screen.findByRole("button", { name: "Save the policy" }));
  await userEvent.click(screen.getByRole("button", { name: "Save" }));
  expect(await screen.findByRole("alert")).toHaveTextContent("It was changed since it was read.");
  expect(asked.find((each) => each.method === "PUT")?.headers.get("If-Match")).toBe('"4"');
  const dialog = within(screen.getByRole("dialog"));
  expect(await dialog.findByText(/keep last/)).toHaveTextContent("keep last: 2 → became 7");
  expect(dialog.getByRole("button", { name: "Save" })).toBeDisabled();
  status = 200;
  await userEvent.click(dialog.getByRole("button", { name: "Reload, and go on from there" }));
  // The new plan is looked at first; the edit is still there.
  expect(screen.queryByRole("dialog")).toBeNull();
  await userEvent.click(await screen.findByRole("button", { name: "Save the policy" }));
  await userEvent.click(screen.getByRole("button", { name: "Save" }));
  expect(await screen.findByText(/The policy is saved. Nothing went to the trash./)).toBeVisible();
  const seen = asked.filter((each) => each.method === "PUT").map((each) => each.headers.get("If-Match"));
  expect(seen).toEqual(['"4"', '"5"']);
});

it("expires by the policy in force, and puts none, where nothing was edited", async () => {
  const asked = serve(answers());
  open("?run=llama");
  await userEvent.click(await screen.findByRole("button", { name: "Expire 1 now" }));
  expect(screen.getByRole("dialog")).toHaveTextContent("The project’s policy stays as it is: keep_last 2.");
  await userEvent.type(screen.getByLabelText("Type 1 to go on"), "1");
  await userEvent.click(screen.getByRole("button", { name: "Expire 1" }));
  expect(await screen.findByText("1 checkpoint went to the trash.")).toBeVisible();
  expect(asked.filter((each) => each.method === "PUT")).toEqual([]);
});

it("offers to undo an action also after the one before it was undone", async () => {
  serve(answers({ "POST /v1/checkpoints/ck_3/undelete": () => ({}) }));
  open("?run=llama");
  for (const _ of ["first", "second"]) {
    await userEvent.click(await screen.findByRole("button", { name: "Expire 1 now" }));
    await userEvent.type(screen.getByLabelText("Type 1 to go on"), "1");
    await userEvent.click(screen.getByRole("button", { name: "Expire 1" }));
    await userEvent.click(await screen.findByRole("button", { name: "Undo: take it back" }));
    expect(await screen.findByText(/1 checkpoint is committed again/)).toBeVisible();
  }
});

it("applies by the policy of the plan that was seen, and shows the new plan if another one holds by now", async () => {
  const policy = { ...POLICY };
  const asked = serve(
    answers({
      "GET /v1/projects/demo/runs/llama/policies/retention": () => policy,
      "POST /v1/projects/demo/runs/llama/retention/plan": () =>
        plan(policy.document.keep_last, { ...policy }, `digest of version ${policy.version}`),
      "POST /v1/projects/demo/runs/llama/retention/apply": () =>
        problem(409, "policy_changed", "The policy is version 5 of the project now. Nothing was expired."),
    }),
  );
  open("?run=llama");
  await userEvent.click(await screen.findByRole("button", { name: "Expire 1 now" }));
  Object.assign(policy, { document: { keep_last: 1 }, version: 5, etag: '"5"' });
  await userEvent.type(screen.getByLabelText("Type 1 to go on"), "1");
  await userEvent.click(screen.getByRole("button", { name: "Expire 1" }));
  expect(await screen.findByText(/version 5 of the project now/)).toBeVisible();
  expect(screen.getByText("Nothing went to the trash.")).toBeVisible();
  expect(screen.queryByRole("button", { name: "Retry what failed" })).toBeNull();
  expect(await screen.findByRole("button", { name: "Expire 2 now" })).toBeVisible();
  const applied = asked.filter((each) => each.url.endsWith("/apply"));
  expect(await Promise.all(applied.map(body))).toEqual([
    { policy_digest: "digest of version 4", checkpoint_ids: ["ck_3"] },
  ]);
});

/** A project of two runs, each on a page of its own, of which one fails as `vit` says. */
function twoRuns(vit: () => Response | null): Parameters<typeof serve>[0] {
  return answers({
    "GET /v1/projects/demo/runs": (request) =>
      new URL(request.url).searchParams.has("cursor")
        ? page({ ...RUN, id: "r2", name: "vit" })
        : { items: [RUN], next_cursor: "more" },
    "POST /v1/projects/demo/runs/vit/retention/plan": async (request) =>
      plan((await body(request)).policy?.keep_last ?? 2, POLICY, "digest", "vit"),
    "POST /v1/projects/demo/runs/vit/retention/apply": async (request) =>
      vit() ?? {
        dry_run: false,
        trashed: trashed((await body(request)).checkpoint_ids),
        left: [],
        purge_at: "2998-01-01T00:00:00Z",
        freed: { bytes: 2 ** 30 },
      },
  });
}

it("makes the plan again after a hold was placed on a checkpoint", async () => {
  const checkpoint = {
    ...{ id: "ck_3", project: "demo", run: "llama", step: 10, attempt: 1, kind: "periodic", state: "committed" },
    ...{ health: "ok", tier: "hot", etag: '"1"', labels: [], metrics: {}, components: {}, missing_ranks: [] },
    ...{ world_size: 1, sealed_ranks: 1, logical_bytes: 100, chunk_bytes: 100, uploaded_bytes: 100 },
    ...{ deduplicated_bytes: 0, created_at: POLICY.updated_at, committed_at: POLICY.updated_at, aborted_at: null },
    ...{ digest: "d".repeat(64), detached: false, pinned_at: null, blocked_seconds: 0 },
  };
  let isHeld = false;
  const OF_RUN = "/v1/projects/demo/runs/llama";
  serve(
    answers({
      [`POST ${OF_RUN}/retention/plan`]: () => plan(isHeld ? 3 : 2, POLICY, "digest"),
      "GET /v1/checkpoints/ck_3": () => checkpoint,
      [`GET ${OF_RUN}/checkpoints/ck_3`]: () => checkpoint,
      [`GET ${OF_RUN}/attempts`]: () => page(),
      [`GET ${OF_RUN}/attempts/1`]: () => ({ number: 1, resumed_from: null, environment: {} }),
      [`GET ${OF_RUN}/restore-point`]: () => ({ restore_point: null, skipped: [], note: "" }),
      "GET /v1/checkpoints/ck_3/holds": () => page(),
      "POST /v1/checkpoints/ck_3/holds": () => {
        isHeld = true;
        return {};
      },
    }),
  );
  const router = open("?run=llama");
  expect(await screen.findByRole("button", { name: "Expire 1 now" })).toBeEnabled();
  await router.navigate({ to: "/checkpoints/$id", params: { id: "ck_3" } });
  await userEvent.click(await screen.findByRole("button", { name: "Hold" }));
  await userEvent.type(screen.getByLabelText("Reason"), "for the audit");
  await userEvent.click(screen.getByRole("button", { name: "Place the hold" }));
  await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  await router.navigate({ to: "/retention", search: { run: "llama" } });
  await waitFor(() => expect(figure("Expire")).toHaveTextContent("0"));
  expect(screen.queryByRole("button", { name: /^Expire/ })).toBeNull();
});

it("counts what expires in every run of the project, the oldest as well", async () => {
  serve(twoRuns(() => null));
  open("");
  await userEvent.click(await screen.findByRole("button", { name: "Expire 2 now" }));
  expect(screen.getByRole("dialog")).toHaveTextContent("2 checkpoints of 2 runs go to the trash now.");
  // Each plan takes what the other run needs as staying.
  expect(screen.getByRole("dialog")).toHaveTextContent("then at least 2.0 GiB are freed");
  expect(screen.getByLabelText("Type 2 to go on")).toBeVisible();
});

it("offers no count while the plan of one run is not known", async () => {
  serve({
    ...twoRuns(() => null),
    "POST /v1/projects/demo/runs/vit/retention/plan": () => problem(400, "invalid_request", "It is too long."),
  });
  open("");
  expect(await screen.findByText(/What expires in the whole project is not known/)).toBeVisible();
  expect(screen.getByRole("alert")).toHaveTextContent("It is too long.");
  expect(screen.queryByRole("button", { name: /Expire/ })).toBeNull();
});

it("keeps what was done when a run fails, with its Undo, and does the rest again", async () => {
  let isBroken = true;
  const asked = serve({
    ...twoRuns(() => (isBroken ? problem(503, "store_unavailable", "The store does not answer.") : null)),
    "POST /v1/checkpoints/ck_3/undelete": () => ({}),
    "POST /v1/checkpoints/vit_ck_3/undelete": () => ({}),
  });
  open("");
  await userEvent.click(await screen.findByRole("button", { name: "Expire 2 now" }));
  await userEvent.type(screen.getByLabelText("Type 2 to go on"), "2");
  await userEvent.click(screen.getByRole("button", { name: "Expire 2" }));
  expect(await screen.findByText("1 checkpoint went to the trash.")).toBeVisible();
  expect(screen.getByText("vit, 1 checkpoint: The store does not answer.")).toBeVisible();
  expect(screen.getByRole("button", { name: "Undo: take it back" })).toBeVisible();

  isBroken = false;
  await userEvent.click(screen.getByRole("button", { name: "Retry what failed" }));
  expect(await screen.findByText("2 checkpoints went to the trash.")).toBeVisible();
  expect(screen.queryByText(/The store does not answer/)).toBeNull();
  expect(asked.filter((each) => each.url.includes("/llama/retention/apply"))).toHaveLength(1);
  await userEvent.click(screen.getByRole("button", { name: "Undo: take all 2 back" }));
  expect(await screen.findByText(/2 checkpoints are committed again/)).toBeVisible();
});

it("says what is wrong with a policy in the service's words, and applies nothing by it", async () => {
  serve(answers());
  open("?run=llama");
  const newest = await screen.findByLabelText("Newest");
  await userEvent.clear(newest);
  await userEvent.type(newest, "five");
  expect(await screen.findByText("keep_last: it must be a number.")).toBeVisible();
  expect(screen.queryByRole("button", { name: /Save the policy/ })).toBeNull();
});

it("lets a reader look, and says which scope is missing", async () => {
  serve(answers({ "GET /v1/sessions/current": () => ({ ...SESSION, scopes: ["read"] }) }));
  open("?run=llama");
  expect(await screen.findByRole("button", { name: "Expire 1 now" })).toHaveAttribute("aria-disabled", "true");
});

it("prunes what was chosen of what a filter found, after a dry run", async () => {
  const kept = {
    checkpoint_id: "ck_9",
    step: 90,
    attempt: 1,
    reasons: [{ kind: "pinned", detail: "pinned by ana: figure 3" }],
  };
  const asked = serve(
    answers({
      "POST /v1/projects/demo/runs/llama/retention/prune": async (request) => {
        const wanted = await body(request);
        if (wanted.checkpoint_ids?.length === 1) await new Promise(() => undefined);
        const found = (wanted.checkpoint_ids as string[] | undefined) ?? ids(3);
        return {
          dry_run: wanted.dry_run,
          trashed: trashed(found),
          left: wanted.dry_run ? [kept] : [],
          purge_at: "2999-01-01T00:00:00Z",
          freed: { bytes: found.length * 2 ** 30, by_store: { "posix:///s": found.length * 2 ** 30 } },
        };
      },
    }),
  );
  open("?view=prune&run=llama");
  await userEvent.type(await screen.findByLabelText("Before step"), "50");
  await userEvent.click(screen.getByRole("button", { name: "Show what matches" }));
  expect(await screen.findByText("pinned by ana: figure 3")).toBeVisible();
  expect(figure("Bytes freed")).toHaveTextContent("3.0 GiB");

  const goes = screen.getByRole("grid", { name: "Checkpoints that would expire" });
  await userEvent.click(within(goes).getAllByRole("checkbox", { name: "Select" })[0] as HTMLElement);
  await waitFor(() => expect(figure("Bytes freed")).toHaveTextContent("2.0 GiB"));
  // While one is being counted, what the two would free is not its figure.
  const second = within(goes).getAllByRole("checkbox", { name: "Select" })[1] as HTMLElement;
  await userEvent.click(second);
  expect(figure("Bytes freed")).toHaveTextContent("…");
  await waitFor(() => expect(figure("Cost a month, once it is freed")).toHaveTextContent("…"));
  await userEvent.click(second);
  await waitFor(() => expect(figure("Bytes freed")).toHaveTextContent("2.0 GiB"));
  await userEvent.click(screen.getByRole("button", { name: "Move 2 to the trash" }));
  const dialog = screen.getByRole("dialog");
  expect(dialog).toHaveTextContent(/They can be taken back until .+2999.*; then the next collection frees 2.0 GiB/);
  expect(within(dialog).getByText("Filter: before step 50.")).toBeVisible();
  await userEvent.type(within(dialog).getByLabelText(/^Why/), "spikes");
  await userEvent.type(within(dialog).getByLabelText("Type 2 to go on"), "2");
  await userEvent.click(within(dialog).getByRole("button", { name: "Move 2 to the trash" }));
  expect(await screen.findByText("2 checkpoints went to the trash.")).toBeVisible();
  const done = await Promise.all(asked.filter((each) => each.url.endsWith("/prune")).map(body));
  expect(done.filter((each) => !each.dry_run)).toEqual([
    {
      filter: { before_step: 50 },
      all_of_run: false,
      dry_run: false,
      checkpoint_ids: ["ck_2", "ck_3"],
      reason: "spikes",
    },
  ]);
});

it("takes checkpoints back from the trash, and says why one stays there", async () => {
  const inTrash = (id: string, step: number) => ({
    id,
    step,
    attempt: 1,
    state: "trashed",
    purge_at: new Date(Date.now() + 7_200_000).toISOString(),
    trashed_by: "policy",
    trash_reason: "retention policy of the run",
    logical_bytes: 100,
  });
  serve(
    answers({
      "GET /v1/projects/demo/runs/llama/checkpoints": () => page(inTrash("ck_1", 10), inTrash("ck_2", 20)),
      "POST /v1/checkpoints/ck_1/undelete": () => ({}),
      "POST /v1/checkpoints/ck_2/undelete": () => problem(409, "chunk_gone", "Its purge has begun."),
    }),
  );
  open("?view=trash&run=llama");
  expect((await screen.findAllByText(/^in (1 h 59 min|2 h),$/))[0]).toBeVisible();
  await userEvent.click(screen.getByRole("checkbox", { name: "Select all that are loaded" }));
  await userEvent.click(screen.getByRole("button", { name: "Take 2 chosen checkpoints back" }));
  expect(await screen.findByText(/1 checkpoint is committed again/)).toBeVisible();
  expect(screen.getByRole("alert")).toHaveTextContent("Its purge has begun.");
});

it("takes one back at the second try, after it has said why the first one failed", async () => {
  let isReached = false;
  let isBack = false;
  const inTrash = {
    ...{ id: "ck_1", project: "demo", run: "llama", step: 10, attempt: 1, state: "trashed", trashed_by: "policy" },
    ...{ trash_reason: "retention policy of the run", logical_bytes: 100, purge_at: "2999-01-01T00:00:00Z" },
  };
  serve(
    answers({
      "GET /v1/projects/demo/runs/llama/checkpoints": () => (isBack ? page() : page(inTrash)),
      "POST /v1/checkpoints/ck_1/undelete": () => {
        isBack = isReached;
        return isReached ? {} : problem(503, "store_unavailable", "The store does not answer.");
      },
    }),
  );
  open("?view=trash&run=llama");
  const button = await screen.findByRole("button", { name: "Take step 10 of attempt 1 of llama back" });
  await userEvent.click(button);
  await waitFor(() => expect(button).toHaveTextContent("Retry"));
  await userEvent.tab();
  await userEvent.tab({ shift: true });
  expect(await screen.findByRole("tooltip")).toHaveTextContent("The store does not answer.");
  isReached = true;
  await userEvent.click(button);
  await waitFor(() => expect(button).not.toBeInTheDocument());
});

it("has the trash of all runs in one list", async () => {
  const trashed = (run: string) => ({
    ...{ id: `ck_${run}`, project: "demo", run, step: 10, attempt: 1, state: "trashed", trashed_by: "person" },
    ...{ purge_at: new Date(Date.now() + 7_200_000).toISOString(), trash_reason: null, logical_bytes: 100 },
  });
  const asked = serve(
    answers({
      "GET /v1/projects/demo/checkpoints": () => page(trashed("llama"), trashed("vit")),
      "GET /v1/projects/demo/runs": () => page(),
      "POST /v1/checkpoints/ck_vit/undelete": () => ({}),
    }),
  );
  open("?view=trash");
  const table = await screen.findByRole("grid", { name: "Checkpoints in the trash" });
  expect(
    within(table)
      .getAllByRole("link")
      .map((each) => each.textContent),
  ).toEqual(["llama", "a person", "vit", "a person"]);
  await userEvent.click(screen.getByRole("button", { name: "Take step 10 of attempt 1 of vit back" }));
  await waitFor(() => expect(asked.some((each) => each.url.endsWith("ck_vit/undelete"))).toBe(true));
  expect(asked.some((each) => /\/(usage|cost)/.test(new URL(each.url).pathname))).toBe(false);
});

it("lists the runs of a project by what they cost", async () => {
  const other = { ...RUN, id: "r2", name: "vit" };
  serve(
    answers({
      "GET /v1/projects/demo/runs": () => page(RUN, other),
      "GET /v1/projects/demo/runs/vit/cost": () => ({ ...COST, run: "vit", per_month: 5 }),
      "GET /v1/projects/demo/runs/vit/usage": () => USAGE,
      "GET /v1/usage": () => page(USAGE),
    }),
  );
  open("?view=usage");
  const table = await screen.findByRole("grid", { name: "Runs and their costs" });
  const rows = within(table).getAllByRole("row").slice(1);
  expect(rows.map((row) => within(row).getAllByRole("gridcell")[0]?.textContent)).toEqual(["vit", "llama"]);
  expect(await screen.findByRole("grid", { name: "Projects and their costs" })).toBeVisible();
});

it("says with which prices a cost is counted, where they are from, and how they are changed", async () => {
  const cold = { store: "cold", store_kind: "s3", storage_class: "GLACIER", stored_bytes: 1 };
  serve(
    answers({
      "GET /v1/projects/demo/cost": () => ({
        ...COST,
        lines: [...COST.lines, { ...cold, per_gib_month: null, per_month: 0 }],
      }),
      "GET /v1/prices": () => ({
        prices: { currency: "USD", as_of: "2026-01-01", source: "The contract of 2026.", prices: [] },
        ...{ is_default: false, updated_by: "ana", updated_at: "2026-02-01T00:00:00Z", etag: '"1"' },
      }),
      "GET /v1/usage": () => page(USAGE),
    }),
  );
  open("?view=usage");
  await userEvent.click(await screen.findByText("Prices as of 2026-01-01"));
  const prices = await screen.findByRole("list", { name: "Prices of a GiB and month" });
  expect(
    within(prices)
      .getAllByRole("listitem")
      .map((each) => each.textContent),
  ).toEqual([
    "The primary store (posix, the default class): 1 USD a GiB and month",
    "The cold store (s3, GLACIER): no price, so it is not in the cost",
  ]);
  expect(await screen.findByText(/^The contract of 2026\. ana put them/)).toBeVisible();
  expect(screen.getByText("holdfast prices put --file prices.json")).toBeVisible();
});

it.each([undefined, "llama"])("names the prices beside what a policy would save (run: %s)", async (run) => {
  serve(answers());
  open(run === undefined ? "" : `?run=${run}`);
  expect(await screen.findByText("Prices as of 2026-01-01")).toBeVisible();
});

const FILTERED = `allOfRun=true&filter=${encodeURIComponent('{"attempt":2}')}`;

it("prunes the run that is chosen in the list of costs by no filter of another one", async () => {
  serve(answers({ "GET /v1/usage": () => page(USAGE) }));
  const router = open(`?view=usage&${FILTERED}`);
  await userEvent.click(await screen.findByRole("link", { name: "Prune llama" }));
  await waitFor(() => expect(router.state.location.search).toEqual({ project: "demo", view: "prune", run: "llama" }));
});

it("takes no filter along to the run that is chosen above", async () => {
  serve(answers());
  const router = open(`?view=prune&${FILTERED}`);
  await screen.findByRole("option", { name: "llama" });
  await userEvent.selectOptions(screen.getByLabelText("Run"), "llama");
  expect(router.state.location.search).toEqual({ project: "demo", view: "prune", run: "llama" });
});
