import { act, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { queryClient } from "@/api/client";
import { openPage, problem, SESSION, serve } from "@/testing/page";
import { ANSWERS, IN_TRASH, page, RUN } from "../examples";

// jsdom has no canvas.
vi.mock("uplot", () => ({
  default: class {
    setData() {}
    destroy() {}
    setSize() {}
  },
}));

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
  openPage("/ui/runs/llama?project=demo");
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

it("shows what it was opened with, whatever events ask again for", async () => {
  const state = deletable();
  openPage("/ui/runs/llama?project=demo");
  await userEvent.click(await screen.findByRole("button", { name: "Delete run" }));
  const typed = await screen.findByLabelText("Type llama to go on");
  const dialog = within(screen.getByRole("dialog", { name: "Delete llama?" }));
  expect(dialog.getByText(/^3 checkpoints go to the trash/)).toBeVisible();
  Object.assign(state, { etag: '"run-2"', checkpoints: 4 });
  await act(() => queryClient.invalidateQueries());
  expect(dialog.getByText(/^3 checkpoints go to the trash/)).toBeVisible();
  await userEvent.type(typed, "llama");
  await userEvent.click(dialog.getByRole("button", { name: "Delete the run" }));
  expect(await dialog.findByText(/^checkpoints/)).toHaveTextContent("checkpoints: 3 → became 4");
  expect(state.sent).toEqual([['"run-1"', ""]]);
});

it("offers to take a deleted run back where a link leads to it", async () => {
  const state = deletable();
  state.isDeleted = true;
  openPage("/ui/runs/llama?project=demo");
  await userEvent.click(await screen.findByRole("button", { name: "Take the run back" }));
  expect(await screen.findByRole("region", { name: "Restore point" })).toBeVisible();
  expect(screen.queryByRole("button", { name: "Take the run back" })).toBeNull();
});

it("says that the deleted runs could not be read, and reads them again", async () => {
  let isBroken = true;
  const state = deletable({
    "GET /v1/projects/demo/runs": () =>
      isBroken ? problem(500, "internal", "The catalog did not answer.") : page({ name: "llama", in_trash: IN_TRASH }),
  });
  state.isDeleted = true;
  openPage("/ui/runs/llama?project=demo");
  expect(await screen.findByText("The catalog did not answer.")).toBeVisible();
  expect(screen.getByRole("link", { name: "deleted runs" })).toHaveAttribute(
    "href",
    expect.stringMatching(/^\/ui\/retention\?.*view=trash/),
  );
  isBroken = false;
  await userEvent.click(screen.getByRole("button", { name: "Retry" }));
  expect(await screen.findByRole("button", { name: "Take the run back" })).toBeVisible();
});

it("says which checkpoints hold a run back, and what else does", async () => {
  const reasons = [{ kind: "pinned", detail: "pinned by ana: figure 3" }];
  const kept = [{ checkpoint_id: "ck-2-200", step: 200, attempt: 2, reasons }];
  const answers = [
    problem(409, "checkpoint_protected", "Nothing was deleted.", { checkpoints: kept, count: 3 }),
    problem(409, "checkpoint_protected", "An attempt of this run is active."),
  ];
  deletable({ [`DELETE ${RUN}`]: () => answers.shift() });
  openPage("/ui/runs/llama?project=demo");
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
  openPage("/ui/runs/llama?project=demo");
  const button = await screen.findByRole("button", { name: "Delete run" });
  expect(button).toHaveAttribute("aria-disabled", "true");
  await userEvent.click(button);
  expect(screen.queryByRole("dialog")).toBeNull();
});
