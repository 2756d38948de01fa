import { screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { Schemas } from "@/api/client";
import { renderSignedIn, serve } from "@/testing/page";
import { Values } from "./Values";

const one = { id: "ck_1", chunk_bytes: 1024 } as Schemas["CheckpointView"];
const other = { id: "ck_2", chunk_bytes: 1024 } as Schemas["CheckpointView"];
const NUMBERS = {
  norm_before: 2,
  norm_after: 3,
  norm_difference: 1,
  relative_change: 0.5,
  largest_difference: 0.25,
  cosine: null,
  nan_before: 0,
  nan_after: 0,
  infinite_before: 0,
  infinite_after: 0,
};
const STARTED = {
  id: "op_1",
  kind: "compare",
  state: "running",
  arguments: { against: "ck_1", dry_run: false },
  progress: { done: 1024, total: 2048, note: "reads what differs" },
  result: null as unknown,
  error: null,
  created_at: "2026-01-01T00:00:00Z",
  ended_at: null as string | null,
};
const RESULT = {
  read_bytes: 2048,
  differing: 3,
  equal: 4,
  tensors: [
    { ...NUMBERS, name: "model/poisoned", nan_after: 7 },
    { ...NUMBERS, name: "model/weight" },
  ],
  components: [{ ...NUMBERS, name: "model", relative_change: 0.125 }],
  not_compared: [{ name: "model/broken", reason: "damaged" }],
  not_compared_left_out: 1,
};
const page = (...items: unknown[]) => ({ items, next_cursor: null });

it("has the values measured, tells how far that is, and what came of it", async () => {
  const started: unknown[] = [];
  let now = STARTED;
  serve({
    "GET /v1/operations": () =>
      page(...(started.length === 0 ? [] : [now]), {
        ...STARTED,
        id: "op_0",
        arguments: { against: "ck_0", dry_run: false },
      }),
    "POST /v1/checkpoints/ck_2/comparisons": async (request: Request) => {
      started.push(await request.json());
      return STARTED;
    },
  });
  const shown = renderSignedIn(<Values one={one} other={other} />);
  expect(await screen.findByText(/Nobody has had them measured/)).toBeVisible();
  await userEvent.click(screen.getByRole("button", { name: "Measure" }));
  const dialog = within(screen.getByRole("dialog"));
  expect(dialog.getByText(/if all of them differ/)).toHaveTextContent("2.0 KiB");
  await userEvent.click(dialog.getByRole("button", { name: "Start" }));
  expect(await screen.findByText(/reads what differs/)).toHaveTextContent("1.0 KiB of 2.0 KiB");
  expect(started).toEqual([{ against: "ck_1", most_tensors: 100, dry_run: false }]);
  now = { ...STARTED, state: "done", result: RESULT, ended_at: STARTED.created_at };
  shown.unmount();
  renderSignedIn(<Values one={one} other={other} />);
  const table = await screen.findByRole("grid", { name: "Tensors by value" });
  expect(within(table).getByRole("row", { name: /model\/poisoned/ })).toHaveTextContent("0, then 7");
  expect(within(table).getByRole("row", { name: /model\/weight/ })).toHaveTextContent("0.5");
  expect(within(table).getByRole("row", { name: /all that differ in model/ })).toHaveTextContent("0.125");
  expect(screen.getByText(/3 tensors measured/)).toBeVisible();
  expect(screen.getByText("The 2 that changed most are named.")).toBeVisible();
  expect(screen.getByText("2 tensors could not be measured")).toBeVisible();
  expect(screen.getByText(/model\/broken: a chunk of it cannot be read now/)).toBeInTheDocument();
});

it("lets a reader see what was measured, and start nothing", async () => {
  serve({ "GET /v1/operations": () => page({ ...STARTED, state: "failed", error: "It is cold." }) });
  renderSignedIn(<Values one={one} other={other} />, { scopes: ["read"] });
  expect(await screen.findByText(/It is cold./)).toBeVisible();
  expect(screen.getByRole("button", { name: "Measure" })).toHaveAttribute("aria-disabled", "true");
});
