import { act, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { openPage, problem, SESSION, serve } from "@/testing/page";
// Loaded here once, so that no test waits for what its route would load.
import "./CheckpointScreen";
import "./compare/CompareScreen";
import "./FinderScreen";

const ID = `ck_${"a1".repeat(16)}`;
const OTHER = `ck_${"b2".repeat(16)}`;
const CHECKPOINT = {
  id: ID,
  project: "demo",
  run: "gpt",
  step: 1200,
  attempt: 2,
  kind: "periodic",
  state: "committed",
  health: "ok",
  health_reason: null,
  tier: "hot",
  etag: '"7"',
  world_size: 1,
  sealed_ranks: 1,
  missing_ranks: [],
  labels: ["paper"],
  metrics: { loss: { value: 0.5, nonfinite: null } },
  components: { model: { kind: "model", logical_bytes: 2048 } },
  logical_bytes: 2048,
  chunk_bytes: 2048,
  uploaded_bytes: 1024,
  deduplicated_bytes: 1024,
  created_at: "2026-01-01T00:00:00Z",
  committed_at: "2026-01-01T00:00:05Z",
  aborted_at: null,
  abort_rank: null,
  abort_reason: null,
  blocked_seconds: 0.25,
  digest: "d".repeat(64),
  detached: false,
  pinned_at: null,
};
const ATTEMPT = { number: 2, resumed_from: OTHER, environment: {}, opened_at: CHECKPOINT.created_at, outcome: null };
const RUN = "/v1/projects/demo/runs/gpt";
const page = (...items: unknown[]) => ({ items, next_cursor: null });
const PRUNED = { dry_run: true, freed: { bytes: 1024, by_store: {} }, left: [], more: false, purge_at: null };
const ANSWERS = {
  "GET /v1/sessions/current": () => ({ ...SESSION, scopes: ["read", "operate"] }),
  "GET /v1/projects": () => page({ id: "1", name: "demo" }),
  [`GET /v1/checkpoints/${ID}`]: () => CHECKPOINT,
  [`GET /v1/checkpoints/${OTHER}`]: () => ({ ...CHECKPOINT, id: OTHER, step: 900, attempt: 1, digest: "e".repeat(64) }),
  [`GET ${RUN}/checkpoints/${ID}`]: () => ({ ...CHECKPOINT, stored_bytes: 1536, unproven: true }),
  [`GET ${RUN}/checkpoints/best%3Aloss`]: () => CHECKPOINT,
  [`GET ${RUN}/checkpoints`]: () => page(),
  "GET /v1/projects/demo/runs": () => page(),
  [`GET ${RUN}/attempts`]: () => page({ ...ATTEMPT, number: 3, resumed_from: ID, outcome: "failed" }, ATTEMPT),
  [`GET ${RUN}/attempts/2`]: () => ATTEMPT,
  [`GET ${RUN}/restore-point`]: () => ({ restore_point: { checkpoint_id: ID, step: 1200 }, skipped: [], note: "" }),
  [`GET /v1/checkpoints/${ID}/holds`]: () => page(),
  "GET /v1/events": () => page(),
  "GET /v1/operations": () => page(),
};

it("tells what the checkpoint is, whether the run would resume from it, and its lineage", async () => {
  serve(ANSWERS);
  openPage(`/ui/checkpoints/${ID}`);
  expect(await screen.findByRole("heading", { name: "demo/gpt@1200#2" })).toBeVisible();
  const remarks = await screen.findByRole("list", { name: "Remarks" });
  expect(await within(remarks).findByText("The run would resume from it now.")).toBeVisible();
  expect(await within(remarks).findByText("unproven")).toBeVisible();
  const lineage = await screen.findByRole("region", { name: "Lineage" });
  expect(await within(lineage).findByRole("link", { name: "step 900, attempt 1" })).toHaveAttribute(
    "href",
    expect.stringContaining(OTHER),
  );
  expect(await within(lineage).findByText(/attempt 3/)).toHaveTextContent("(failed)");
  expect(screen.getByText("holdfast checkpoints pull demo/gpt@1200#2 out")).toBeVisible();
});

it("draws the lineage of a fork into the run that it was forked from, also when that is gone", async () => {
  const forked_from = { project: "demo", run: "base", checkpoint_id: OTHER, attempt: 1, step: 900, saved_in: "base" };
  const asked: (string | null)[] = [];
  const answers = {
    ...ANSWERS,
    [`GET /v1/checkpoints/${ID}`]: () => ({ ...CHECKPOINT, forked_from }),
    "GET /v1/projects/demo/runs": (request: Request) => {
      asked.push(new URL(request.url).searchParams.get("forked_from"));
      return page({ id: "r", project: "demo", name: "gpt-lower-lr" });
    },
  };
  serve(answers);
  openPage(`/ui/checkpoints/${ID}`);
  const lineage = await screen.findByRole("region", { name: "Lineage" });
  expect(await within(lineage).findByRole("link", { name: "demo/base@900#1" })).toHaveAttribute(
    "href",
    expect.stringContaining(OTHER),
  );
  expect(await within(lineage).findByRole("link", { name: "gpt-lower-lr" })).toBeVisible();
  expect(asked).toContain(ID);
  serve({
    ...answers,
    [`GET /v1/checkpoints/${OTHER}`]: () => problem(404, "checkpoint_not_found", `There is no checkpoint ${OTHER}.`),
  });
  queryClient.clear();
  openPage(`/ui/checkpoints/${ID}`);
  expect(await screen.findByText("demo/base@900#1, which is gone")).toBeVisible();
});

it("writes a metric onto the version that was there when it was opened, and says what another has changed", async () => {
  const now = { ...CHECKPOINT };
  const bodies: unknown[] = [];
  const seen: (string | null)[] = [];
  serve({
    ...ANSWERS,
    [`GET /v1/checkpoints/${ID}`]: () => ({ ...now }),
    [`PATCH /v1/checkpoints/${ID}`]: async (request: Request) => {
      seen.push(request.headers.get("if-match"));
      bodies.push(await request.json());
      return seen.at(-1) === now.etag ? now : problem(412, "edit_conflict", "Somebody was faster. Look again.");
    },
  });
  openPage(`/ui/checkpoints/${ID}`);
  await userEvent.click(await screen.findByRole("button", { name: "Add a metric" }));
  await userEvent.type(screen.getByLabelText("Name"), "accuracy");
  // A poll brings somebody else's edit while this person types.
  Object.assign(now, { etag: '"8"', labels: ["paper", "release"] });
  await queryClient.invalidateQueries();
  expect(await screen.findByText("release")).toBeVisible();
  await userEvent.type(screen.getByLabelText("Value"), "0.81");
  await userEvent.click(screen.getByRole("button", { name: "Save" }));
  const dialog = within(screen.getByRole("dialog"));
  expect(await dialog.findByRole("alert")).toHaveTextContent("Somebody was faster. Look again.");
  expect(await dialog.findByText(/^labels/)).toHaveTextContent("labels: paper → became paper, release");
  await userEvent.click(dialog.getByRole("button", { name: "Reload, and go on from there" }));
  expect(dialog.queryByRole("alert")).toBeNull();
  await userEvent.click(dialog.getByRole("button", { name: "Save" }));
  await vi.waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  expect(seen).toEqual(['"7"', '"8"']);
  expect(bodies[1]).toEqual({ metrics: { accuracy: { value: 0.81 } } });
});

it("keeps a label that another person added while the labels were edited here", async () => {
  const now = { ...CHECKPOINT, labels: ["paper", "draft"] };
  const bodies: unknown[] = [];
  serve({
    ...ANSWERS,
    [`GET /v1/checkpoints/${ID}`]: () => ({ ...now }),
    [`PATCH /v1/checkpoints/${ID}`]: async (request: Request) => {
      bodies.push(await request.json());
      const isNewest = request.headers.get("if-match") === now.etag;
      return isNewest ? now : problem(412, "edit_conflict", "Somebody was faster. Look again.");
    },
  });
  openPage(`/ui/checkpoints/${ID}`);
  await userEvent.click(await screen.findByRole("button", { name: "Edit the labels" }));
  const dialog = within(screen.getByRole("dialog"));
  await userEvent.clear(dialog.getByLabelText(/^Labels/));
  await userEvent.type(dialog.getByLabelText(/^Labels/), "paper mine");
  Object.assign(now, { etag: '"8"', labels: ["paper", "draft", "release"] });
  await userEvent.click(dialog.getByRole("button", { name: "Save" }));
  await userEvent.click(await dialog.findByRole("button", { name: "Reload, and go on from there" }));
  await userEvent.click(dialog.getByRole("button", { name: "Save" }));
  await vi.waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  expect(bodies).toEqual([{ labels: ["paper", "mine"] }, { labels: ["paper", "release", "mine"] }]);
});

const DRILL = {
  id: "op_1",
  kind: "drill",
  state: "succeeded",
  arguments: { selector: ID, store: "second" },
  progress: {},
  error: null,
  created_at: CHECKPOINT.created_at,
  result: { bytes: 2048, chunks: 4, tensors: 7, seconds: 90, newest_step: 1300, rpo_seconds: 3600, rpo_steps: 100 },
};

it("drills this very checkpoint, makes one drill however often it is tried, and shows what came of it", async () => {
  const started: { key: string | null; body: unknown }[] = [];
  const asked = serve({
    ...ANSWERS,
    [`GET /v1/checkpoints/${ID}/manifest`]: () => ({ checkpoint: CHECKPOINT, layout_digest: null, shards: [] }),
    [`GET /v1/checkpoints/${ID}/impact`]: () => ({ chunks: [], checkpoints: [], runs: [], left_off: 0, lost: false }),
    [`GET ${RUN}/copies`]: () => ({ store: null }),
    "GET /v1/store-clocks": () => page({ role: "primary" }, { role: "second" }),
    "GET /v1/operations": () => page(...(started.length < 2 ? [] : [DRILL])),
    [`POST ${RUN}/drills`]: async (request: Request) => {
      started.push({ key: request.headers.get("idempotency-key"), body: await request.json() });
      return started.length === 1 ? problem(503, "busy", "Try again.") : DRILL;
    },
  });
  openPage(`/ui/checkpoints/${ID}?part=copies`);
  expect(await screen.findByText(/No drill has restored it yet/)).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Start a drill" }));
  const dialog = within(screen.getByRole("dialog"));
  await dialog.findByRole("option", { name: "second" });
  await userEvent.selectOptions(dialog.getByLabelText("The only store that is read"), "second");
  await userEvent.click(dialog.getByRole("button", { name: "Start the drill" }));
  expect(await dialog.findByRole("alert")).toHaveTextContent("Try again.");
  await userEvent.click(dialog.getByRole("button", { name: "Start the drill" }));
  const drills = await screen.findByRole("list", { name: "Drills of this checkpoint" });
  expect(drills).toHaveTextContent(
    "restored in 1 min 30 s (RTO), 2.0 KiB in 4 chunks and 7 tensors, each byte verified",
  );
  expect(drills).toHaveTextContent("It was 1 h and 100 steps behind step 1,300, the newest (RPO).");
  expect(started.map((each) => each.body)).toEqual([DRILL.arguments, DRILL.arguments]);
  expect(started[0]?.key).toMatch(/^[0-9a-f]{32}$/);
  expect(started[1]?.key).toBe(started[0]?.key);
  const listed = asked.find((each) => each.url.includes("/v1/operations"));
  expect(new URL(listed?.url ?? "").searchParams.get("checkpoint_id")).toBe(ID);
});

it("asks for the copies again while one is under way, and shows what has come", async () => {
  vi.useFakeTimers({ toFake: ["setInterval", "clearInterval"] });
  onTestFinished(() => void vi.useRealTimers());
  let state = "copying";
  const copy = { store: "second", storage_class: null, proof: "store_sha256", codec: "raw", stored_bytes: 2048 };
  serve({
    ...ANSWERS,
    [`GET /v1/checkpoints/${ID}/manifest`]: () => MANIFEST,
    [`GET /v1/checkpoints/${ID}/shards/0`]: () => ({ rank: 0, digest: SHARD.digest, chunks: [{ digest: "f00d" }] }),
    "GET /v1/chunks/f00d/impact": () => ({
      chunks: [{ project: "demo", digest: "f00d", copies: [{ ...copy, state, verified_at: null }] }],
    }),
    [`GET /v1/checkpoints/${ID}/impact`]: () => ({ chunks: [], checkpoints: [], runs: [], left_off: 0, lost: false }),
    [`GET ${RUN}/copies`]: () => ({
      ...{ store: "second", policy: true, error: null },
      ...(state === "copying" ? { copied_step: null, waiting: 1 } : { copied_step: 1200, waiting: 0 }),
    }),
    "GET /v1/operations": () => page(),
  });
  openPage(`/ui/checkpoints/${ID}?part=copies`);
  expect(await screen.findByText("copying")).toBeVisible();
  expect(await screen.findByText(/1 waiting/)).toBeVisible();
  state = "verified";
  await act(async () => void vi.advanceTimersByTime(15_000));
  expect(await screen.findByText("verified")).toBeVisible();
  expect(await screen.findByText(/whole there is step 1,200/)).toBeVisible();
});

it("starts a drill from the head of its screen, and shows it among the others", async () => {
  serve({
    ...ANSWERS,
    [`GET /v1/checkpoints/${ID}/manifest`]: () => ({ checkpoint: CHECKPOINT, layout_digest: null, shards: [] }),
    [`GET /v1/checkpoints/${ID}/impact`]: () => ({ chunks: [], checkpoints: [], runs: [], left_off: 0, lost: false }),
    [`GET ${RUN}/copies`]: () => ({ store: null }),
    "GET /v1/store-clocks": () => page({ role: "primary" }),
    "GET /v1/operations": () => page(DRILL),
    [`POST ${RUN}/drills`]: () => DRILL,
  });
  const router = openPage(`/ui/checkpoints/${ID}`);
  expect(await screen.findByText("holdfast drills start demo/gpt@1200#2")).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Drill" }));
  await userEvent.click(within(screen.getByRole("dialog")).getByRole("button", { name: "Start the drill" }));
  expect(await screen.findByRole("list", { name: "Drills of this checkpoint" })).toHaveTextContent(
    "each byte verified",
  );
  expect(router.state.location.search).toMatchObject({ part: "copies" });
});

it("deletes after the dry run, by typing the count", async () => {
  const asked: { dry_run: boolean }[] = [];
  serve({
    ...ANSWERS,
    [`POST ${RUN}/retention/prune`]: async (request: Request) => {
      asked.push((await request.json()) as { dry_run: boolean });
      return { ...PRUNED, trashed: [{ checkpoint_id: ID, step: 1200, attempt: 2, health: "ok", logical_bytes: 2048 }] };
    },
  });
  openPage(`/ui/checkpoints/${ID}`);
  await userEvent.click(await screen.findByRole("button", { name: "See what would go" }));
  await userEvent.click(await screen.findByRole("button", { name: "Move to the trash" }));
  const dialog = within(screen.getByRole("dialog"));
  expect(dialog.getByText(/1 checkpoint goes to the trash/)).toBeVisible();
  expect(dialog.getByRole("button", { name: "Move to the trash" })).toBeDisabled();
  await userEvent.type(dialog.getByLabelText(/Type/), "1");
  await userEvent.click(dialog.getByRole("button", { name: "Move to the trash" }));
  await vi.waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  expect(asked.map((each) => each.dry_run)).toEqual([true, false]);
});

it("offers no deletion of a checkpoint after the dry run of another", async () => {
  serve({
    ...ANSWERS,
    [`GET ${RUN}/checkpoints/${OTHER}`]: () => ({ stored_bytes: 1536, unproven: true }),
    [`GET ${RUN}/attempts/1`]: () => ({ ...ATTEMPT, number: 1, resumed_from: null }),
    [`GET /v1/checkpoints/${OTHER}/holds`]: () => page(),
    [`POST ${RUN}/retention/prune`]: () => ({
      ...PRUNED,
      trashed: [{ checkpoint_id: ID, step: 1200, attempt: 2, health: "ok", logical_bytes: 2048 }],
    }),
  });
  openPage(`/ui/checkpoints/${ID}`);
  await userEvent.click(await screen.findByRole("button", { name: "See what would go" }));
  expect(await screen.findByRole("button", { name: "Move to the trash" })).toBeVisible();
  const lineage = within(await screen.findByRole("region", { name: "Lineage" }));
  await userEvent.click(await lineage.findByRole("link", { name: "step 900, attempt 1" }));
  expect(await screen.findByRole("heading", { name: "demo/gpt@900#1" })).toBeVisible();
  expect(screen.getByRole("button", { name: "See what would go" })).toBeVisible();
  expect(screen.queryByRole("button", { name: "Move to the trash" })).toBeNull();
});

it("says why a token cannot change it", async () => {
  serve({ ...ANSWERS, "GET /v1/sessions/current": () => ({ ...SESSION, scopes: ["read"] }) });
  openPage(`/ui/checkpoints/${ID}`);
  const button = await screen.findByRole("button", { name: "Quarantine" });
  expect(button).toHaveAttribute("aria-disabled", "true");
  await userEvent.click(button);
  expect(screen.queryByRole("dialog")).toBeNull();
});

it("opens the checkpoint that a selector means, and says what to type otherwise", async () => {
  serve(ANSWERS);
  const router = openPage("/ui/checkpoints");
  await userEvent.type(await screen.findByLabelText("Find a checkpoint"), "nonsense{Enter}");
  expect(await screen.findByRole("alert")).toHaveTextContent("project/run@selector");
  await userEvent.clear(screen.getByLabelText("Find a checkpoint"));
  await userEvent.type(screen.getByLabelText("Find a checkpoint"), "demo/gpt@best:loss{Enter}");
  expect(await screen.findByRole("heading", { name: "demo/gpt@1200#2" })).toBeVisible();
  expect(router.state.location.pathname).toBe(`/checkpoints/${ID}`);
});

const TICKET = {
  digest: "f".repeat(64),
  bytes: 100,
  stored_bytes: 100,
  codec: "raw",
  kind: "http",
  path: "",
  headers: {},
};
const SHARD = { rank: 0, state: "sealed", chunk_count: 4, digest: "c".repeat(64), finite: true, logical_bytes: 2048 };
const MANIFEST = { checkpoint: CHECKPOINT, layout_digest: TICKET.digest, shards: [SHARD] };
const reads = (url: string) => () => ({ lease_id: "rl_1", chunks: [{ ...TICKET, url }], lease_expires_in_seconds: 60 });

it("asks no object store for the tensors, says so, and shows what each rank stored", async () => {
  const asked = serve({
    ...ANSWERS,
    [`GET /v1/checkpoints/${ID}/manifest`]: () => MANIFEST,
    [`POST /v1/checkpoints/${ID}/reads`]: reads("https://bucket.s3.example/chunk?signature=1"),
    "DELETE /v1/read-leases/rl_1": () => new Response(null, { status: 204 }),
  });
  openPage(`/ui/checkpoints/${ID}?part=tensors`);
  expect(await screen.findByText("The tensors cannot be shown here")).toBeVisible();
  expect(await screen.findByRole("grid", { name: "Shards" })).toHaveTextContent("sealed");
  expect(asked.filter((request) => request.url.includes("s3.example"))).toEqual([]);
  expect(asked.some((request) => request.method === "DELETE")).toBe(true);
});

it("compares with another: what differs, in numbers, and which shards are the same bytes", async () => {
  const gone = { ...reads("")(), chunks: [{ ...TICKET, kind: "gone", url: "" }] };
  const other = { ...CHECKPOINT, id: OTHER, step: 900, metrics: { loss: { value: 0.75, nonfinite: null } } };
  serve({
    ...ANSWERS,
    [`GET /v1/checkpoints/${OTHER}`]: () => other,
    [`GET /v1/checkpoints/${ID}/manifest`]: () => MANIFEST,
    [`GET /v1/checkpoints/${OTHER}/manifest`]: () => ({ ...MANIFEST, checkpoint: other }),
    [`GET /v1/checkpoints/${ID}/shards/0`]: () => ({ rank: 0, digest: SHARD.digest, chunks: [] }),
    [`GET /v1/checkpoints/${OTHER}/shards/0`]: () => ({ rank: 0, digest: SHARD.digest, chunks: [] }),
    [`POST /v1/checkpoints/${ID}/reads`]: () => gone,
    [`POST /v1/checkpoints/${OTHER}/reads`]: () => gone,
    "DELETE /v1/read-leases/rl_1": () => new Response(null, { status: 204 }),
  });
  openPage(`/ui/checkpoints/${ID}/compare?with=${OTHER}`);
  const metrics = await screen.findByRole("table", { name: "Metrics" });
  expect(within(metrics).getByText("+0.25")).toBeVisible();
  expect(within(metrics).getByText("differs")).toBeInTheDocument();
  expect(await screen.findByText("1 of 1 shards are the same bytes.")).toBeVisible();
  expect(screen.getByText(/Both were saved by attempt 2/)).toBeVisible();
});
