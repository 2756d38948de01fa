import { act, fireEvent, screen, waitFor, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import type { makeRouter } from "@/app/routes";
import { openPage, problem, SESSION, serve } from "@/testing/page";

type Answers = Parameters<typeof serve>[0];

const page = (...items: unknown[]) => ({ items, next_cursor: null });
const OF_PROJECT = "/v1/projects/demo/policies";
const OF_RUN = "/v1/projects/demo/runs/llama/policies";
const OBJECTIVES = {
  ...{ kind: "objectives", project: "demo", run: null, level: "project", version: 4, etag: '"4"' },
  ...{ document: { rpo_seconds: 3600, rto_seconds: 900 }, updated_at: "2026-01-01T00:00:00Z", updated_by: "ops" },
};
const none = () => problem(404, "policy_not_found", "There is none.");
const body = async (request: Request | undefined) => JSON.parse((await request?.clone().text()) ?? "null");

function open(search: string, answers: Answers) {
  const asked = serve({
    "GET /v1/sessions/current": () => SESSION,
    "GET /v1/projects": () => page({ id: "1", name: "demo", quota_bytes: null, stored_bytes: 0, runs: 1 }),
    "GET /v1/projects/demo/runs": () => page({ id: "r1", project: "demo", name: "llama" }),
    ...answers,
  });
  const router = openPage(`/ui/retention${search}`);
  const put = () => asked.filter((each) => each.method === "PUT");
  return { asked, put, router };
}

async function type(label: string, text: string) {
  const field = await screen.findByLabelText(label);
  await userEvent.clear(field);
  await userEvent.type(field, text);
}

type Router = ReturnType<typeof makeRouter>;

/** Once the edit has settled, and through the dialog, which says what the policy will be. */
async function save(router: Router, draft: object, words: string) {
  await waitFor(() => expect(router.state.location.search).toHaveProperty("draft", draft));
  await userEvent.click(await screen.findByRole("button", { name: "Save the policy" }));
  expect(within(screen.getByRole("dialog")).getByText(words)).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Save" }));
}

const RPO = "A committed state may lack a copy for (RPO)";
const RTO = "A restore must be done within (RTO)";

it("shows a policy with its level, and saves the version that was seen", async () => {
  let now = OBJECTIVES;
  const { put, router } = open("?kind=objectives", {
    [`GET ${OF_PROJECT}/objectives`]: () => now,
    [`PUT ${OF_PROJECT}/objectives`]: async (request) => {
      now = { ...OBJECTIVES, document: (await body(request)).document, version: 5, etag: '"5"' };
      return now;
    },
  });
  expect(await screen.findByText(/The project’s policy, version 4 by ops/)).toBeVisible();
  expect(screen.getByText("RPO 1 h, RTO 15 min")).toBeVisible();
  expect(screen.getByLabelText(RTO)).toHaveValue("15min");
  await type(RPO, "2h");
  await save(router, { rpo_seconds: 7200, rto_seconds: 900 }, "RPO 2 h, RTO 15 min");
  expect(await screen.findByText("The policy is saved.")).toBeVisible();
  expect(await screen.findByText(/The project’s policy, version 5 by ops/)).toBeVisible();
  expect(router.state.location.search).not.toHaveProperty("draft");
  expect(put()[0]?.headers.get("If-Match")).toBe('"4"');
  expect(await body(put()[0])).toEqual({ document: { rpo_seconds: 7200, rto_seconds: 900 } });
});

it("says at each field what the service refuses, and what it says of none of them", async () => {
  const errors = [
    { where: ["body", "document", "rto_seconds"], message: "Input should be a valid integer." },
    { where: ["body", "document"], message: "Two halves make no policy." },
  ];
  const { router } = open("?kind=objectives", {
    [`GET ${OF_PROJECT}/objectives`]: () => OBJECTIVES,
    [`PUT ${OF_PROJECT}/objectives`]: () => problem(422, "invalid_request", "Correct the policy.", { errors }),
  });
  await type(RTO, "soon");
  await save(router, { rpo_seconds: 3600, rto_seconds: "soon" }, "RPO 1 h, RTO soon");
  const alert = await screen.findByRole("alert");
  expect(within(alert).getByRole("listitem")).toHaveTextContent("Two halves make no policy.");
  await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  expect(screen.getByLabelText(RTO)).toBeInvalid();
  expect(screen.getByLabelText(RTO)).toHaveAccessibleDescription("Input should be a valid integer.");
  expect(screen.getByLabelText(RPO)).toBeValid();
  await type(RTO, "1h");
  await waitFor(() => expect(screen.getByLabelText(RTO)).toBeValid());
  expect(screen.queryByRole("alert")).toBeNull();
});

it("makes a run its own tiers out of its project's, and shows what the store refuses in the dialog", async () => {
  const rules = [{ after: "7d", storage_class: "infrequent" }];
  const { put, router } = open("?kind=tiers&run=llama", {
    [`GET ${OF_RUN}/tiers`]: () => ({ ...OBJECTIVES, kind: "tiers", document: { rules } }),
    [`PUT ${OF_RUN}/tiers`]: () => problem(422, "invalid_request", "The store is posix, which has no such class."),
    "GET /v1/projects/demo/runs/llama/tiers/plan": () => ({ rows: [], totals: [], policy_level: "project" }),
  });
  expect(await screen.findByText(/The project’s policy holds for this run, version 4/)).toBeVisible();
  expect(await screen.findByText("No checkpoint yet")).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Add a rule" }));
  await userEvent.type(screen.getAllByLabelText("Longer ago than")[1] as HTMLElement, "30d");
  await userEvent.selectOptions(screen.getAllByLabelText("Moves to")[1] as HTMLElement, "archive");
  await userEvent.click(screen.getByRole("checkbox", { name: "final" }));
  const document = { rules: [...rules, { after: "30d", storage_class: "archive" }], stay_hot: { kinds: ["final"] } };
  await save(router, document, "after 7d: infrequent, after 30d: archive; hot for ever: kind final");
  expect(await screen.findByText("The store is posix, which has no such class.")).toBeVisible();
  expect(screen.getByRole("dialog", { name: "Tiers of llama" })).toBeVisible();
  // The run had none of its own: there is no version to name.
  expect(put()[0]?.headers.get("If-Match")).toBeNull();
  expect(await body(put()[0])).toEqual({ document });
});

it("tells what another person has changed, and saves nothing before that was seen", async () => {
  const theirs = { ...OBJECTIVES, document: { rpo_seconds: 60, rto_seconds: 900 }, version: 5, etag: '"5"' };
  let isTheirs = false;
  const { put, router } = open("?kind=objectives", {
    [`GET ${OF_PROJECT}/objectives`]: () => (isTheirs ? theirs : OBJECTIVES),
    [`PUT ${OF_PROJECT}/objectives`]: (request) => {
      if (request.headers.get("If-Match") === '"5"') return theirs;
      isTheirs = true;
      return problem(412, "edit_conflict", "It was changed since it was read.");
    },
  });
  const edited = { rpo_seconds: 3600, rto_seconds: 3600 };
  await type(RTO, "1h");
  await save(router, edited, "RPO 1 h, RTO 1 h");
  const dialog = within(screen.getByRole("dialog"));
  expect(await dialog.findByText(/^rpo seconds/)).toHaveTextContent("rpo seconds: 3600 → became 60");
  await userEvent.click(screen.getByRole("button", { name: "Reload, and go on from there" }));
  expect(await screen.findByText(/The project’s policy, version 5/)).toBeVisible();
  await save(router, edited, "RPO 1 h, RTO 1 h");
  await waitFor(() => expect(put().map((each) => each.headers.get("If-Match"))).toEqual(['"4"', '"5"']));
});

it("says that another person has changed the policy under an edit, and saves the edit once that was seen", async () => {
  const theirs = {
    ...OBJECTIVES,
    document: { rpo_seconds: 60, rto_seconds: 900 },
    ...{ version: 5, etag: '"5"', updated_by: "ana" },
  };
  let now = OBJECTIVES;
  const { put, router } = open("?kind=objectives", {
    [`GET ${OF_PROJECT}/objectives`]: () => now,
    [`PUT ${OF_PROJECT}/objectives`]: (request) =>
      request.headers.get("If-Match") === now.etag ? now : problem(412, "edit_conflict", "It was changed."),
  });
  const edited = { rpo_seconds: 3600, rto_seconds: 3600 };
  await type(RTO, "1h");
  await waitFor(() => expect(router.state.location.search).toHaveProperty("draft", edited));
  now = theirs;
  // The page comes back into sight, and reads what holds now.
  await act(() => queryClient.invalidateQueries({ queryKey: ["get"] }));
  expect(await screen.findByText(/The project’s policy, version 5/)).toBeVisible();
  expect(screen.getByText(/ana changed the policy after this edit was begun/)).toBeVisible();
  expect(screen.getByText(/^rpo seconds/)).toHaveTextContent("rpo seconds: 60 → became 3600");
  expect(screen.getByRole("button", { name: "Save the policy" })).toHaveAttribute("aria-disabled", "true");
  await userEvent.click(screen.getByRole("button", { name: "Go on from what holds now" }));
  await save(router, edited, "RPO 1 h, RTO 1 h");
  await waitFor(() => expect(put().map((each) => each.headers.get("If-Match"))).toEqual(['"5"']));
});

it("says so, too, of an edit that was opened again by its address", async () => {
  const { put } = open(`?kind=objectives&begun=${encodeURIComponent('project "3"')}&draft={"rto_seconds":3600}`, {
    [`GET ${OF_PROJECT}/objectives`]: () => OBJECTIVES,
  });
  expect(await screen.findByText(/ops changed the policy after this edit was begun/)).toBeVisible();
  expect(screen.getByLabelText(RTO)).toHaveValue("1h");
  await userEvent.click(screen.getByRole("button", { name: "Save the policy" }));
  expect(screen.queryByRole("dialog")).toBeNull();
  expect(put()).toEqual([]);
});

it("goes on with what was typed after the dialog was opened", async () => {
  let now = OBJECTIVES;
  const { put, router } = open("?kind=objectives", {
    [`GET ${OF_PROJECT}/objectives`]: () => now,
    [`PUT ${OF_PROJECT}/objectives`]: async (request) => {
      now = { ...OBJECTIVES, document: (await body(request)).document, version: 5, etag: '"5"' };
      return now;
    },
  });
  await type(RTO, "1h");
  const button = await screen.findByRole("button", { name: "Save the policy" });
  fireEvent.change(screen.getByLabelText(RPO), { target: { value: "3h" } });
  fireEvent.click(button);
  expect(within(screen.getByRole("dialog")).getByText("RPO 1 h, RTO 1 h")).toBeVisible();
  // It settles while the dialog is open.
  const typed = { rpo_seconds: 10_800, rto_seconds: 3600 };
  await waitFor(() => expect(router.state.location.search).toHaveProperty("draft", typed));
  await userEvent.click(screen.getByRole("button", { name: "Save" }));
  expect(await screen.findByText(/The project’s policy, version 5/)).toBeVisible();
  expect(screen.getByText("Edited, and not saved.")).toBeVisible();
  expect(screen.getByLabelText(RPO)).toHaveValue("3h");
  expect(await body(put()[0])).toEqual({ document: { rpo_seconds: 3600, rto_seconds: 3600 } });
});

it("shows the policy of its own that a run has got meanwhile", async () => {
  const own = { ...OBJECTIVES, run: "llama", level: "run", document: { rpo_seconds: 60 }, version: 1, etag: '"1"' };
  let isTheirs = false;
  const { put, router } = open("?kind=objectives&run=llama", {
    [`GET ${OF_RUN}/objectives`]: () => (isTheirs ? own : OBJECTIVES),
    [`PUT ${OF_RUN}/objectives`]: (request) => {
      if (request.headers.get("If-Match") === '"1"') return own;
      isTheirs = true;
      return problem(428, "edit_needs_version", "Say which version was seen.");
    },
  });
  const edited = { rpo_seconds: 3600, rto_seconds: 3600 };
  await type(RTO, "1h");
  await save(router, edited, "RPO 1 h, RTO 1 h");
  const dialog = within(screen.getByRole("dialog"));
  expect(await dialog.findByText(/^rpo seconds/)).toHaveTextContent(/became 60$/);
  await userEvent.click(screen.getByRole("button", { name: "Reload, and go on from there" }));
  expect(await screen.findByText(/The run’s own policy, version 1/)).toBeVisible();
  await save(router, edited, "RPO 1 h, RTO 1 h");
  await waitFor(() => expect(put().map((each) => each.headers.get("If-Match"))).toEqual([null, '"1"']));
});

it("copies every checkpoint where there is no policy and no condition", async () => {
  const { put } = open("?kind=copies", {
    [`GET ${OF_PROJECT}/copies`]: none,
    [`PUT ${OF_PROJECT}/copies`]: () => ({ ...OBJECTIVES, kind: "copies", document: {} }),
  });
  expect(await screen.findByText("The project has no policy of copies.")).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Copy every checkpoint" }));
  expect(within(screen.getByRole("dialog")).getByText("every checkpoint")).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Save" }));
  expect(await screen.findByText("The policy is saved.")).toBeVisible();
  expect(await body(put()[0])).toEqual({ document: {} });
});

it("deletes a run's own policy by its version, and takes no edit along to another kind", async () => {
  let isOwn = true;
  const own = { ...OBJECTIVES, run: "llama", level: "run", etag: '"7"' };
  const { asked, router } = open("?kind=objectives&run=llama", {
    [`GET ${OF_RUN}/objectives`]: () => (isOwn ? own : OBJECTIVES),
    [`DELETE ${OF_RUN}/objectives`]: () => {
      isOwn = false;
      return own;
    },
    [`GET ${OF_RUN}/copies`]: none,
  });
  await userEvent.click(await screen.findByRole("button", { name: "Delete the policy" }));
  expect(screen.getByText(/Then the project’s policy of objectives holds for the run/)).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Delete" }));
  expect(await screen.findByText(/The project’s policy holds for this run/)).toBeVisible();
  expect(asked.find((each) => each.method === "DELETE")?.headers.get("If-Match")).toBe('"7"');
  await type(RPO, "3h");
  await screen.findByText("Edited, and not saved.");
  await userEvent.click(screen.getByRole("link", { name: "Copies" }));
  expect(await screen.findByText("Neither this run nor its project has a policy of copies.")).toBeVisible();
  expect(router.state.location.search).toEqual({ project: "demo", run: "llama", kind: "copies" });
});

it("lets a reader look, and says which scope is missing", async () => {
  open("?kind=copies", {
    "GET /v1/sessions/current": () => ({ ...SESSION, scopes: ["read"] }),
    [`GET ${OF_PROJECT}/copies`]: none,
  });
  const button = await screen.findByRole("button", { name: "Copy every checkpoint" });
  expect(button).toHaveAttribute("aria-disabled", "true");
});
