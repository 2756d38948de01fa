import { act, screen, within } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { problem, renderSignedIn, serve } from "@/testing/page";
import { Trends } from "./Trends";

// jsdom has no canvas: the numbers are read from the tables.
vi.mock("uplot", () => ({
  default: class {
    destroy() {}
    setSize() {}
    setData() {}
  },
}));

const SAMPLES = "GET /v1/projects/demo/samples";

function sample(since: string, more: object = {}) {
  return {
    since,
    taken_at: since,
    hours: 1,
    missed_hours: 0,
    committed_checkpoints: 1,
    logical_bytes: 1024,
    goodput: 0.5,
    productive_seconds: 1800,
    wall_seconds: 3600,
    stored_bytes: 2048,
    stores: { primary: 2048 },
    per_month: 1,
    currency: "USD",
    unpriced_bytes: 0,
    live_runs: 1,
    runs_without_restore_point: 0,
    restore_point_age_seconds: 60,
    ...more,
  };
}

function rowsOf(title: string): string[][] {
  const table = screen.getByRole("table", { name: title, hidden: true });
  return within(table)
    .getAllByRole("row", { hidden: true })
    .slice(1)
    .map((row) => [...row.querySelectorAll("th, td")].map((cell) => cell.textContent ?? ""));
}

it("says what a week was, in words and in tables, and leaves gaps where nothing is known", async () => {
  const asked = serve({
    [SAMPLES]: () => ({
      items: [
        sample("2026-01-01T06:00:00Z", { stored_bytes: 4096, missed_hours: 4, per_month: 3 }),
        sample("2026-01-01T01:00:00Z", { goodput: null, productive_seconds: 0, wall_seconds: 0 }),
        sample("2026-01-01T00:00:00Z", { missed_hours: 9, goodput: 1, productive_seconds: 3600 }),
      ],
      next_cursor: null,
    }),
  });
  renderSignedIn(<Trends project="demo" />);
  expect(await screen.findByText("75.0 % of the time")).toBeVisible();
  expect(screen.getByText("4.0 KiB, +2.0 KiB")).toBeVisible();
  expect(screen.getByText("3.00 USD, +2.00 USD")).toBeVisible();
  expect(screen.getByText(/no samples in 4 hours/)).toBeVisible();
  expect(rowsOf("Goodput").map((row) => row[1])).toEqual(["100.0 %", "–", "–", "50.0 %"]);
  expect(rowsOf("Stored bytes").map((row) => row[1])).toEqual(["2.0 KiB", "2.0 KiB", "–", "4.0 KiB"]);
  expect(new URL(asked[0]?.url ?? "").searchParams.get("limit")).toBe("168");
});

it("tells UTC of an hour in a table on focus", async () => {
  serve({ [SAMPLES]: () => ({ items: [sample("2026-01-01T01:00:00Z")], next_cursor: null }) });
  renderSignedIn(<Trends project="demo" />);
  await userEvent.click(await screen.findByText("Goodput as a table"));
  const table = screen.getByRole("table", { name: "Goodput" });
  act(() => table.querySelector("time")?.focus());
  expect(await screen.findByRole("tooltip")).toHaveTextContent("2026-01-01 01:00:00 UTC");
});

it("compares no cost in another currency", async () => {
  serve({
    [SAMPLES]: () => ({
      items: [
        sample("2026-01-01T01:00:00Z", { currency: "EUR", per_month: 5 }),
        sample("2026-01-01T00:00:00Z", { currency: "USD", per_month: 9 }),
      ],
      next_cursor: null,
    }),
  });
  renderSignedIn(<Trends project="demo" />);
  expect(await screen.findByText("5.00 EUR, no change")).toBeVisible();
  expect(rowsOf("Cost a month").map((row) => row[1])).toEqual(["–", "5.00 EUR"]);
  expect(screen.queryByText(/no samples in/)).toBeNull();
});

it("says that there is no sample yet", async () => {
  serve({ [SAMPLES]: () => ({ items: [], next_cursor: null }) });
  renderSignedIn(<Trends project="demo" />);
  expect(await screen.findByText("There is no sample yet")).toBeVisible();
});

it("says what failed", async () => {
  serve({ [SAMPLES]: () => problem(403, "forbidden", "The token lacks the scope read.") });
  renderSignedIn(<Trends project="demo" />);
  expect(await screen.findByRole("alert")).toHaveTextContent("The token lacks the scope read.");
});
