import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { type Session, sessionQuery } from "@/api/session";
import { openPage, problem, SESSION, serve } from "@/testing/page";

const AT = "2026-01-02T03:04:05Z";
const PROJECT = {
  ...{
    id: "1",
    name: "demo",
    created_at: AT,
    quota_bytes: 1e9,
    quota_used_bytes: 950e6,
    stored_bytes: 3e9,
    logical_bytes: 2e9,
    runs: 0,
    quotas: [
      { kind: "bytes", hard: 1e9, soft: null, used: 950e6 },
      { kind: "objects", hard: null, soft: null, used: 12 },
      { kind: "runs", hard: 500, soft: 400, used: 7 },
    ],
  },
  ...{ etag: '"v7"', in_trash: null },
};
const CONTROLLER = {
  ...{ name: "scrub", interval_seconds: 60, paused_at: null, paused_by: null, pause_reason: null },
  ...{ run_requested_at: null, run_answered_at: null, due: 12, leased: 0, lag_seconds: 90, done: 7, failed: 1 },
  ...{ last_pass_at: AT, pass_seconds: 0.5, report: { bytes_read: 4096 }, report_at: AT },
  ...{ error: "The store gave no answer.", error_at: "2026-01-02T03:04:06Z" },
};
const OPERATION = {
  ...{
    id: "op_1",
    kind: "drill",
    project: "demo",
    run: "llama",
    checkpoint_id: "ck_1",
    arguments: { store: "second" },
  },
  ...{ state: "running", progress: { done: 3, total: 4, note: "reads shard 3" }, result: null, error: null, tries: 1 },
  ...{ created_at: AT, created_by: "ana", started_at: AT, ended_at: null, cancel_requested_at: null },
};
const WEBHOOK = {
  ...{ id: "wh_1", project: "demo", url: "https://alerts.example/holdfast", format: "standard", waiting: 1 },
  ...{ events: ["attempt.lost"], given_up: 2, created_at: AT, created_by: "ana", deleted_at: null },
};
const DELIVERY = {
  ...{ id: "msg_1", event: "attempt.lost", created_at: AT, delivered_at: null, given_up_at: null, tries: 3 },
  ...{ next_try_at: AT, last_status: 503, last_error: "The receiver answered 503." },
};
const TOKEN = {
  ...{ id: "tk_1", name: "old laptop", project: null, scopes: ["read"], created_at: AT },
  ...{ expires_at: null, revoked_at: null },
};
const AUDIT = {
  ...{ id: 7, at: AT, actor: "ana", actor_kind: "person", token_id: "tk_9", action: "checkpoint.trash" },
  ...{ project: "demo", run: "llama", checkpoint_id: "ck_1", step: 400, reason: "diverged" },
  ...{ before: { state: "committed" }, after: { state: "trashed" } },
};
const page = (...items: unknown[]) => ({ items, next_cursor: null });

function open(address: string, answers: Parameters<typeof serve>[0], session: Partial<Session> = {}) {
  const signedIn = { ...SESSION, scopes: ["read", "operate", "admin"], ...session };
  const asked = serve({
    "GET /v1/sessions/current": () => signedIn,
    "GET /v1/projects": () => page(PROJECT),
    ...answers,
  });
  const router = openPage(address);
  const queries = (path: string) =>
    asked.filter((each) => new URL(each.url).pathname === path).map((each) => new URL(each.url).searchParams);
  const sent = async (call: string) => {
    const found = asked.find((each) => `${each.method} ${new URL(each.url).pathname}` === call);
    return found && { request: found, body: JSON.parse((await found.clone().text()) || "null") as unknown };
  };
  return { router, queries, sent };
}

describe("controllers", () => {
  const answers = {
    "GET /v1/controllers": () => page(CONTROLLER),
    "POST /v1/controllers/scrub/pause": () => CONTROLLER,
    "POST /v1/controllers/scrub/run": () => CONTROLLER,
  };

  it("opens with them, and says state, backlog and the last error", async () => {
    const { router } = open("/ui/operations", answers);
    expect(await screen.findByText("The store gave no answer.")).toBeVisible();
    expect(router.state.location.pathname).toBe("/operations/controllers");
    const row = screen.getByText("scrub").closest('[role="row"]') as HTMLElement;
    for (const text of ["failing", "12", "1 min 30 s"]) expect(within(row).getByText(text)).toBeVisible();
  });

  it("pauses with a reason, and not without", async () => {
    const { sent } = open("/ui/operations/controllers", answers);
    await userEvent.click(await screen.findByRole("button", { name: "Pause scrub" }));
    await userEvent.click(screen.getByRole("button", { name: "Pause" }));
    expect(await sent("POST /v1/controllers/scrub/pause")).toBeUndefined();
    await userEvent.type(screen.getByLabelText(/Reason/), " the store moves ");
    await userEvent.click(screen.getByRole("button", { name: "Pause" }));
    expect(await screen.findByText(/scrub is paused/)).toBeVisible();
    expect((await sent("POST /v1/controllers/scrub/pause"))?.body).toEqual({ reason: "the store moves" });
  });

  it("runs one now, and shows its last pass at an address", async () => {
    const { router, sent } = open("/ui/operations/controllers", answers);
    await userEvent.click(await screen.findByRole("button", { name: "Run scrub now" }));
    expect(await screen.findByText("scrub: a process makes a pass now.")).toBeVisible();
    expect(await sent("POST /v1/controllers/scrub/run")).toBeDefined();
    screen.getByRole("grid").focus();
    await userEvent.keyboard("{Enter}");
    expect(await within(await screen.findByRole("dialog")).findByText("bytes read")).toBeVisible();
    expect(router.state.location.search).toMatchObject({ controller: "scrub" });
    await userEvent.click(screen.getByRole("button", { name: "Close" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
  });

  it("says what stands in the way of a token, and asks nothing", async () => {
    const { queries } = open("/ui/operations/controllers", {}, { project: "demo" });
    expect(await screen.findByText(/belongs to the project “demo”/)).toBeVisible();
    expect(queries("/v1/controllers")).toEqual([]);
  });

  it("disables what the scope does not allow", async () => {
    open("/ui/operations/controllers", answers, { scopes: ["read"] });
    const button = await screen.findByRole("button", { name: "Pause scrub" });
    expect(button).toHaveAttribute("aria-disabled", "true");
    await userEvent.click(button);
    expect(screen.queryByRole("dialog")).not.toBeInTheDocument();
  });
});

describe("long operations", () => {
  const answers = {
    "GET /v1/operations": () => page(OPERATION),
    "GET /v1/operations/op_1": () => OPERATION,
    "POST /v1/operations/op_1/cancel": () => OPERATION,
  };

  it("shows how far one is, and cancels it when that is confirmed", async () => {
    const { sent } = open("/ui/operations/long", answers);
    expect(await screen.findByText("75.0 %")).toBeVisible();
    expect(screen.getByRole("progressbar", { name: "Progress of drill" })).toHaveAttribute("value", "3");
    await userEvent.click(screen.getByRole("button", { name: "Cancel drill op_1" }));
    await userEvent.click(screen.getByRole("button", { name: "Cancel the operation" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
    const cancelled = await sent("POST /v1/operations/op_1/cancel");
    expect(cancelled?.request.headers.get("X-Holdfast-CSRF")).toBe("csrf");
  });

  it("filters by the address, and opens one by it", async () => {
    const { queries } = open("/ui/operations/long?state=running&kind=drill&operation=op_1", answers);
    expect(await within(await screen.findByRole("dialog")).findByText("second")).toBeVisible();
    expect(queries("/v1/operations")[0]?.toString()).toBe("project=demo&state=running&kind=drill&limit=100");
  });
});

describe("events", () => {
  const EVENT = {
    ...{ id: "1-5", type: "attempt.lost", timestamp: AT },
    data: { project: "demo", run: "llama", attempt: 2, reason: "no heartbeat" },
  };

  it("filters by run and type, in the address", async () => {
    const { router, queries } = open("/ui/operations/events", { "GET /v1/events": () => page(EVENT) });
    expect(await screen.findByText("no heartbeat")).toBeVisible();
    await userEvent.type(screen.getByLabelText("Run"), "llama{Enter}");
    await userEvent.click(screen.getByText("Every type"));
    await userEvent.click(screen.getByRole("checkbox", { name: "attempt.lost" }));
    await waitFor(() =>
      expect(queries("/v1/events").at(-1)?.toString()).toBe("project=demo&run=llama&type=attempt.lost&limit=100"),
    );
    expect(router.state.location.search).toMatchObject({ run: "llama", type: ["attempt.lost"] });
  });

  it("follows every project when it shows every project", async () => {
    const { queries } = open("/ui/operations/events?everywhere=true", { "GET /v1/events": () => page(EVENT) });
    await screen.findByText("no heartbeat");
    expect(queries("/v1/events").at(-1)?.has("project")).toBe(false);
    expect(queries("/v1/events/stream").some((each) => !each.has("project"))).toBe(true);
  });
});

describe("webhooks", () => {
  const answers = {
    "GET /v1/projects/demo/webhooks": () => page(WEBHOOK),
    "POST /v1/projects/demo/webhooks": () => ({ ...WEBHOOK, secret: "whsec_once" }),
    "GET /v1/webhooks/wh_1": () => WEBHOOK,
    "GET /v1/webhooks/wh_1/deliveries": () => page(DELIVERY),
    "POST /v1/webhooks/wh_1/test": () => DELIVERY,
    "DELETE /v1/webhooks/wh_1": () => WEBHOOK,
  };

  it("tests one, then shows its calls: what failed, and when it is tried again", async () => {
    const { router } = open("/ui/operations/webhooks", answers);
    await userEvent.click(await screen.findByRole("button", { name: `Test ${WEBHOOK.url}` }));
    const calls = await screen.findByRole("grid", { name: "Calls" });
    for (const text of ["retrying", "503", "The receiver answered 503."]) {
      expect(within(calls).getByText(text)).toBeVisible();
    }
    expect(router.state.location.search).toMatchObject({ webhook: "wh_1" });
  });

  it("repeats a call whose reply was lost with the same key, and another call with another", async () => {
    const keys: (string | null)[] = [];
    open("/ui/operations/webhooks", {
      ...answers,
      "POST /v1/projects/demo/webhooks": (request) => {
        keys.push(request.headers.get("Idempotency-Key"));
        return problem(503, "busy", "Too many calls are under way.");
      },
    });
    await userEvent.click(await screen.findByRole("button", { name: "New webhook" }));
    const url = screen.getByLabelText(/URL/);
    await userEvent.type(url, "https://one.example");
    const make = screen.getByRole("button", { name: "Make the webhook" });
    for (const more of ["", "", "/other"]) {
      if (more) await userEvent.type(url, more);
      await userEvent.click(make);
      await waitFor(() => expect(make).toBeEnabled());
    }
    expect(keys[1]).toBe(keys[0]);
    expect(keys[2]).not.toBe(keys[0]);
  });

  it("makes one, and shows its secret once", async () => {
    const { sent } = open("/ui/operations/webhooks", answers);
    await userEvent.click(await screen.findByRole("button", { name: "New webhook" }));
    await userEvent.type(screen.getByLabelText(/URL/), "https://alerts.example/holdfast");
    await userEvent.click(screen.getByRole("checkbox", { name: "attempt.failed" }));
    await userEvent.click(screen.getByRole("button", { name: "Make the webhook" }));
    expect(await screen.findByText("whsec_once")).toBeVisible();
    const made = await sent("POST /v1/projects/demo/webhooks");
    expect(made?.body).toEqual({
      ...{ url: "https://alerts.example/holdfast", format: "standard" },
      events: expect.arrayContaining(["attempt.failed", "attempt.lost", "run.goes_on", "store.available"]),
    });
    expect(made?.request.headers.get("Idempotency-Key")).toMatch(/^[0-9a-f]{32}$/);
    await userEvent.click(screen.getByRole("button", { name: "I have copied it" }));
    expect(screen.queryByText("whsec_once")).not.toBeInTheDocument();
  });

  it("sends a call that was given up again, with a key", async () => {
    const again = "POST /v1/webhooks/wh_1/deliveries/msg_1/redeliver";
    const { sent } = open("/ui/operations/webhooks?webhook=wh_1", {
      ...answers,
      "GET /v1/webhooks/wh_1/deliveries": () => page({ ...DELIVERY, next_try_at: null, given_up_at: AT }),
      [again]: () => ({ ...DELIVERY, tries: 0 }),
    });
    await userEvent.click(await screen.findByRole("button", { name: "Send attempt.lost msg_1 again" }));
    expect(await screen.findByText(/msg_1 is sent again/)).toBeVisible();
    expect((await sent(again))?.request.headers.get("Idempotency-Key")).toMatch(/^[0-9a-f]{32}$/);
  });

  it("deletes one when that is confirmed", async () => {
    const { sent } = open("/ui/operations/webhooks", answers);
    await userEvent.click(await screen.findByRole("button", { name: `Delete ${WEBHOOK.url}` }));
    expect(screen.getByRole("dialog")).toHaveTextContent("1 waiting call is not made");
    await userEvent.click(within(screen.getByRole("dialog")).getByRole("button", { name: "Delete" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
    expect(await sent("DELETE /v1/webhooks/wh_1")).toBeDefined();
  });

  it("needs the scope admin", async () => {
    open("/ui/operations/webhooks", {}, { scopes: ["read", "operate"] });
    expect(await screen.findByText(/has not the scope “admin”/)).toBeVisible();
  });
});

describe("tokens", () => {
  const answers = {
    "GET /v1/tokens": () => page(TOKEN),
    "POST /v1/tokens": () => ({ ...TOKEN, name: "trainers", token: "hold_once" }),
    "DELETE /v1/tokens/tk_1": () => TOKEN,
  };

  it("makes one with scopes, project and expiry; gives none that it lacks; shows it once", async () => {
    const { sent } = open("/ui/operations/tokens", answers);
    await userEvent.click(await screen.findByRole("button", { name: "New token" }));
    await userEvent.type(screen.getByLabelText(/^Name/), "trainers");
    await userEvent.click(screen.getByRole("button", { name: "Make the token" }));
    expect(await sent("POST /v1/tokens")).toBeUndefined(); // no scope was chosen
    expect(screen.getByRole("checkbox", { name: /^train:/ })).toBeDisabled();
    await userEvent.click(screen.getByRole("checkbox", { name: /^read:/ }));
    await userEvent.selectOptions(screen.getByLabelText(/^Expires after/), "7 days");
    await userEvent.click(screen.getByRole("button", { name: "Make the token" }));
    expect(await screen.findByText("hold_once")).toBeVisible();
    expect((await sent("POST /v1/tokens"))?.body).toEqual({
      ...{ name: "trainers", scopes: ["read"], project: "demo", expires_in_seconds: 7 * 86_400 },
    });
    await userEvent.click(screen.getByRole("button", { name: "I have copied it" }));
    expect(screen.queryByText("hold_once")).not.toBeInTheDocument();
  });

  it("keeps a secret on the screen when a check of the session fails, and checks again on demand", async () => {
    let isReached = true;
    open("/ui/operations/tokens", {
      ...answers,
      "GET /v1/sessions/current": () =>
        isReached
          ? { ...SESSION, scopes: ["read", "admin"] }
          : problem(500, "internal", "The service failed. Try again."),
    });
    await userEvent.click(await screen.findByRole("button", { name: "New token" }));
    await userEvent.type(screen.getByLabelText(/^Name/), "trainers");
    await userEvent.click(screen.getByRole("checkbox", { name: /^read:/ }));
    await userEvent.click(screen.getByRole("button", { name: "Make the token" }));
    expect(await screen.findByText("hold_once")).toBeVisible();
    isReached = false;
    await queryClient.invalidateQueries({ queryKey: sessionQuery.queryKey });
    const alert = await screen.findByRole("alert");
    expect(alert).toHaveTextContent("The service failed. Try again.");
    expect(screen.getByText("hold_once")).toBeVisible();
    isReached = true;
    await userEvent.click(within(alert).getByRole("button", { name: "Retry" }));
    await waitFor(() => expect(screen.queryByRole("alert")).not.toBeInTheDocument());
    expect(screen.getByText("hold_once")).toBeVisible();
  });

  it("revokes one when its name is typed", async () => {
    const { sent } = open("/ui/operations/tokens", answers);
    await userEvent.click(await screen.findByRole("button", { name: "Revoke old laptop" }));
    const dialog = screen.getByRole("dialog");
    expect(within(dialog).getByRole("button", { name: "Revoke" })).toBeDisabled();
    await userEvent.type(within(dialog).getByLabelText("Type old laptop to go on"), "old laptop");
    await userEvent.click(within(dialog).getByRole("button", { name: "Revoke" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
    expect(await sent("DELETE /v1/tokens/tk_1")).toBeDefined();
  });
});

it("revokes a token whose name has spaces that nobody sees", async () => {
  const { sent } = open("/ui/operations/tokens", {
    "GET /v1/tokens": () => page({ ...TOKEN, name: "old  laptop " }),
    "DELETE /v1/tokens/tk_1": () => TOKEN,
  });
  await userEvent.click(await screen.findByRole("button", { name: /^Revoke old/ }));
  const dialog = within(screen.getByRole("dialog"));
  await userEvent.type(dialog.getByLabelText("Type old laptop to go on"), "old laptop");
  await userEvent.click(dialog.getByRole("button", { name: "Revoke" }));
  await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
  expect(await sent("DELETE /v1/tokens/tk_1")).toBeDefined();
});

describe("projects", () => {
  it("edits the quotas that a person has changed, from the version that was seen", async () => {
    const { sent } = open("/ui/operations/projects", { "PUT /v1/projects/demo": () => PROJECT });
    expect(await screen.findByText("near")).toBeVisible(); // 95 % of the quota
    await userEvent.click(screen.getByRole("button", { name: "Edit the quotas of demo" }));
    const field = screen.getByLabelText("Quota of bytes");
    expect(screen.getByLabelText("Soft quota of runs")).toHaveValue("400");
    expect(field).toHaveValue("1 GB");
    await userEvent.clear(field);
    await userEvent.type(field, "much");
    await userEvent.click(screen.getByRole("button", { name: "Set the quotas" }));
    expect(await sent("PUT /v1/projects/demo")).toBeUndefined();
    await userEvent.clear(field);
    await userEvent.type(field, "2 TiB");
    await userEvent.clear(screen.getByLabelText("Quota of runs"));
    await userEvent.type(screen.getByLabelText("Soft quota of rows"), "5M");
    await userEvent.click(screen.getByRole("button", { name: "Set the quotas" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
    const put = await sent("PUT /v1/projects/demo");
    expect(put?.body).toEqual({ quota_bytes: 2 * 1024 ** 4, quota_runs: null, soft_quota_rows: 5e6 });
    expect(put?.request.headers.get("If-Match")).toBe('"v7"');
  });

  it("sets a quota that another person has changed meanwhile, once that was seen", async () => {
    const changed = { bytes: { hard: 3e9 }, runs: { soft: 350 } };
    const quotas = PROJECT.quotas.map((each) => ({ ...each, ...changed[each.kind as keyof typeof changed] }));
    const theirs = { ...PROJECT, quota_bytes: 3e9, quotas, etag: '"v8"' };
    const versions: (string | null)[] = [];
    open("/ui/operations/projects", {
      "GET /v1/projects/demo": () => theirs,
      "PUT /v1/projects/demo": (request) => {
        versions.push(request.headers.get("If-Match"));
        return versions.at(-1) === theirs.etag ? theirs : problem(412, "edit_conflict", "It was changed.");
      },
    });
    await userEvent.click(await screen.findByRole("button", { name: "Edit the quotas of demo" }));
    const dialog = within(screen.getByRole("dialog"));
    await userEvent.clear(dialog.getByLabelText("Quota of bytes"));
    await userEvent.type(dialog.getByLabelText("Quota of bytes"), "2 TiB");
    await userEvent.click(dialog.getByRole("button", { name: "Set the quotas" }));
    expect(await dialog.findByText(/^Quota of bytes:/)).toHaveTextContent("Quota of bytes: 1 GB → became 3 GB");
    await userEvent.click(dialog.getByRole("button", { name: "Reload, and go on from there" }));
    expect(dialog.getByLabelText("Quota of bytes")).toHaveValue("2 TiB");
    expect(dialog.getByLabelText("Soft quota of runs")).toHaveValue("350"); // which nobody has touched here
    await userEvent.click(dialog.getByRole("button", { name: "Set the quotas" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
    expect(versions).toEqual(['"v7"', '"v8"']);
  });

  it("makes one", async () => {
    const { sent } = open("/ui/operations/projects", { "PUT /v1/projects/vision": () => PROJECT });
    await userEvent.click(await screen.findByRole("button", { name: "New project" }));
    await userEvent.type(screen.getByLabelText("Name"), "vision");
    await userEvent.click(screen.getByRole("button", { name: "Make the project" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
    expect((await sent("PUT /v1/projects/vision"))?.body).toEqual({});
  });

  it("shows why a project cannot be deleted, by a dry run", async () => {
    open("/ui/operations/projects", {
      "DELETE /v1/projects/demo": () =>
        problem(409, "checkpoint_protected", "demo has runs: llama. Delete them first."),
    });
    await userEvent.click(await screen.findByRole("button", { name: "Delete demo" }));
    expect(await screen.findByText("demo has runs: llama. Delete them first.")).toBeVisible();
    await userEvent.click(screen.getByRole("button", { name: "Cancel" }));
    expect(screen.queryByRole("dialog")).not.toBeInTheDocument();
  });

  it("reads anew what it would delete when the name has become another project's, and lets a person go on", async () => {
    const state = { etag: '"project-1"', sent: [] as unknown[] };
    const theirs = { ...PROJECT, created_at: "2027-01-02T03:04:05Z", stored_bytes: 7 * 2 ** 30 };
    open("/ui/operations/projects", {
      "GET /v1/projects/demo": () => theirs,
      "DELETE /v1/projects/demo": async (request) => {
        const { dry_run, reason } = await request.json();
        const seen = request.headers.get("If-Match");
        if (!dry_run) state.sent.push([seen, reason]);
        if (!dry_run && seen !== state.etag) return problem(412, "edit_conflict", "It was changed. Look again.");
        return { project: "demo", run: null, dry_run, etag: state.etag, checkpoints: 0, in_trash: null };
      },
    });
    await userEvent.click(await screen.findByRole("button", { name: "Delete demo" }));
    await userEvent.type(await screen.findByLabelText("Type demo to go on"), "demo");
    const dialog = within(screen.getByRole("dialog", { name: "Delete demo?" }));
    await userEvent.type(dialog.getByLabelText(/^Reason/), "moved");
    state.etag = '"project-2"';
    await userEvent.click(dialog.getByRole("button", { name: "Delete the project" }));
    expect(await dialog.findByText(/^stored:/)).toHaveTextContent(/became 7.0 GiB/);
    expect(dialog.getByText(/^made:/)).toHaveTextContent(/became .*2027/);
    expect(dialog.getByRole("button", { name: "Delete the project" })).toBeDisabled();
    await userEvent.click(dialog.getByRole("button", { name: "Reload, and go on from there" }));
    expect(dialog.getByText(/^It has no run/)).toHaveTextContent(/goes to the trash with 7.0 GiB/);
    await userEvent.click(dialog.getByRole("button", { name: "Delete the project" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).not.toBeInTheDocument());
    expect(state.sent).toEqual([
      ['"project-1"', "moved"],
      ['"project-2"', "moved"],
    ]);
  });

  it("says what keeps it when the project cannot be deleted any more", async () => {
    let isInUse = false;
    open("/ui/operations/projects", {
      "GET /v1/projects/demo": () => PROJECT,
      "DELETE /v1/projects/demo": async (request) => {
        const { dry_run } = await request.json();
        if (!dry_run) isInUse = true;
        if (!dry_run) return problem(412, "edit_conflict", "It was changed. Look again.");
        if (isInUse) return problem(409, "checkpoint_protected", "demo has runs: llama. Delete them first.");
        return { project: "demo", run: null, dry_run, etag: '"project-1"', checkpoints: 0, in_trash: null };
      },
    });
    await userEvent.click(await screen.findByRole("button", { name: "Delete demo" }));
    await userEvent.type(await screen.findByLabelText("Type demo to go on"), "demo");
    await userEvent.click(screen.getByRole("button", { name: "Delete the project" }));
    expect(await screen.findByText("demo has runs: llama. Delete them first.")).toBeVisible();
  });

  it("takes one back out of the trash", async () => {
    const inTrash = { deleted_at: AT, deleted_by: "ana", purge_at: AT, reason: "moved" };
    const { sent, queries } = open("/ui/operations/projects?deleted=true", {
      "GET /v1/projects": () => page({ ...PROJECT, in_trash: inTrash }),
      "POST /v1/projects/demo/undelete": () => ({ project: "demo", checkpoints: 0, purged: 0 }),
    });
    await userEvent.click(await screen.findByRole("button", { name: "Take back demo" }));
    expect(await screen.findByText("demo is back, with its runs.")).toBeVisible();
    expect(await sent("POST /v1/projects/demo/undelete")).toBeDefined();
    expect(queries("/v1/projects").some((each) => each.get("deleted") === "true")).toBe(true);
  });
});

it("says who changed what, by filters in the address", async () => {
  const { router, queries } = open("/ui/operations/audit?actor=ana&event=7", {
    "GET /v1/audit-events": () => page(AUDIT),
  });
  const dialog = await screen.findByRole("dialog", { name: "checkpoint.trash" });
  for (const text of ["committed", "trashed", "diverged"]) expect(within(dialog).getByText(text)).toBeVisible();
  await userEvent.click(within(dialog).getByRole("button", { name: "Close" }));
  await userEvent.type(screen.getByLabelText("Action begins with"), "checkpoint.{Enter}");
  await waitFor(() =>
    expect(queries("/v1/audit-events").at(-1)?.toString()).toBe("project=demo&actor=ana&action=checkpoint.&limit=100"),
  );
  expect(router.state.location.search).toMatchObject({ actor: "ana", action: "checkpoint." });
  expect(screen.getByText("state: committed → trashed")).toBeVisible();
  await userEvent.click(screen.getByLabelText("Deletions only"));
  await waitFor(() =>
    expect(queries("/v1/audit-events").at(-1)?.getAll("action")).toEqual(
      expect.arrayContaining(["checkpoint.trash", "checkpoint.expire", "run.delete", "project.delete"]),
    ),
  );
  expect(router.state.location.searchStr).not.toContain("action");
});

it("asks for a time in UTC, and for none that the service does not know", async () => {
  const { queries } = open("/ui/operations/audit?since=2026-01-01&until=%2B275760-09-13T00:00:00Z", {
    "GET /v1/audit-events": () => page(AUDIT),
  });
  await screen.findByText("state: committed → trashed");
  const asked = queries("/v1/audit-events").at(-1);
  expect([asked?.get("since"), asked?.get("until")]).toEqual(["2026-01-01T00:00:00.000Z", null]);
});

it("narrows the events to a time, which stands in the address", async () => {
  const { router, queries } = open("/ui/operations/events?since=2026-01-01", { "GET /v1/events": () => page() });
  expect(await screen.findByText("None fits the filters: widen them.")).toBeVisible();
  await waitFor(() =>
    expect(queries("/v1/events").at(-1)?.toString()).toBe("project=demo&since=2026-01-01T00%3A00%3A00.000Z&limit=100"),
  );
  fireEvent.change(screen.getByLabelText("Before"), { target: { value: "2026-01-02T03:00" } });
  fireEvent.blur(screen.getByLabelText("Before"));
  const until = new Date("2026-01-02T03:00").toISOString();
  await waitFor(() => expect(queries("/v1/events").at(-1)?.get("until")).toBe(until));
  expect(router.state.location.search).toMatchObject({ since: "2026-01-01T00:00:00.000Z", until });
  const hourAgo = Date.now() - 3_600_000;
  await userEvent.click(screen.getByRole("button", { name: "Last hour" }));
  await waitFor(() => expect(queries("/v1/events").at(-1)?.has("until")).toBe(false));
  const since = Date.parse(queries("/v1/events").at(-1)?.get("since") ?? "");
  expect(since - hourAgo).toBeGreaterThanOrEqual(0);
  expect(since - hourAgo).toBeLessThan(60_000);
  await userEvent.click(screen.getByRole("button", { name: "Any time" }));
  await waitFor(() => expect(router.state.location.searchStr).not.toContain("since"));
  expect(await screen.findByText(/A commit, a restore, a failure/)).toBeVisible();
});

it("shows the processes, and which is silent", async () => {
  const WORKER = { id: "w1", kind: "worker", host: "node-1", pid: 42, version: "1", started_at: AT, seen_at: AT };
  open("/ui/operations/workers", {
    "GET /v1/workers": () => page({ ...WORKER, silent: true, done: { scrub: 7, purge: 0 } }),
  });
  expect(await screen.findByText("silent", { selector: "[class*=badge]" })).toBeVisible();
  expect(screen.getByText("scrub 7")).toBeVisible();
});
