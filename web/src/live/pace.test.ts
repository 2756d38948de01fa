import { QueryClient, QueryObserver } from "@tanstack/react-query";
import type { Schemas } from "@/api/client";
import { Pace } from "./pace";

const queries = new QueryClient();
const later = (milliseconds: number) => vi.advanceTimersByTimeAsync(milliseconds);
const committed = { type: "checkpoint.committed", data: { project: "p", run: "r" } } as Schemas["EventView"];

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  queries.clear();
  vi.useRealTimers();
});

/** Something on the screen. `takesMs`: how long its call takes; `data`: what it gives. Counts the calls. */
async function onScreen(path: string, takesMs = 0, key: object = { project: "p" }, data: unknown = null) {
  const counts = { calls: 0, aborted: 0 };
  const observer = new QueryObserver(queries, {
    queryKey: ["get", path, { params: { path: key } }],
    queryFn: async ({ signal }) => {
      counts.calls += 1;
      signal.addEventListener("abort", () => {
        counts.aborted += 1;
      });
      await new Promise((resolve) => setTimeout(resolve, takesMs));
      return data;
    },
  });
  onTestFinished(observer.subscribe(() => undefined));
  await later(takesMs);
  return counts;
}

function makePace() {
  const pace = new Pace(queries);
  onTestFinished(() => pace.stop());
  return pace;
}

it("asks for a burst once, and for what the service adds up seldom, however many events come", async () => {
  const runs = await onScreen("/v1/projects/{project}/runs");
  const usage = await onScreen("/v1/projects/{project}/usage");
  const pace = makePace();
  for (let burst = 0; burst < 5; burst += 1) pace.take(committed);
  await later(1000);
  expect([runs.calls, usage.calls]).toEqual([2, 2]);
  for (let second = 0; second < 60; second += 1) {
    pace.take(committed);
    await later(1000);
  }
  expect(runs.calls).toBeLessThanOrEqual(2 + 20);
  expect(usage.calls).toBeLessThanOrEqual(2 + 2);
});

it("asks seldom for a list of which much was read, and for a short one beside it as before", async () => {
  const short = await onScreen("/v1/projects/{project}/runs");
  const pages = { pages: [{ items: Array(60).fill("run") }, { items: Array(60).fill("run") }] };
  const long = await onScreen("/v1/projects/{project}/runs", 0, { project: "p", of: "training" }, pages);
  const whole = await onScreen("/v1/projects/{project}/runs", 0, { project: "p", of: "all" }, Array(500).fill("run"));
  const pace = makePace();
  for (let second = 0; second < 60; second += 1) {
    pace.take(committed);
    await later(1000);
  }
  expect(short.calls).toBeGreaterThan(15);
  expect(long.calls).toBeLessThanOrEqual(1 + 3);
  expect(whole.calls).toBeLessThanOrEqual(1 + 3);
});

it("shows the last event's change, too", async () => {
  const usage = await onScreen("/v1/projects/{project}/usage");
  const pace = makePace();
  pace.take(committed);
  await later(1000);
  pace.take(committed);
  await later(30_000);
  expect(usage.calls).toBe(3);
});

it("cancels no call that is under way, and asks again when it is over", async () => {
  const slow = await onScreen("/v1/projects/{project}/runs", 10_000);
  const pace = makePace();
  pace.take(committed);
  await later(2000);
  expect(slow.calls).toBe(2);
  pace.take(committed);
  await later(7000);
  expect(slow).toEqual({ calls: 2, aborted: 0 });
  await later(10_000);
  expect(slow).toEqual({ calls: 3, aborted: 0 });
});

it("asks for a table's rows a few at a time", async () => {
  const rows = [];
  for (let row = 0; row < 50; row += 1) {
    rows.push(await onScreen("/v1/projects/{project}/runs/{run}/goodput", 0, { project: "p", run: `r${row}` }));
  }
  const pace = makePace();
  for (let row = 0; row < 50; row += 1) {
    pace.take({ type: "attempt.failed", data: { project: "p", run: `r${row}` } } as Schemas["EventView"]);
  }
  await later(1000);
  expect(rows.filter((each) => each.calls === 2)).toHaveLength(20);
  await later(70_000);
  expect(rows.every((each) => each.calls === 2)).toBe(true);
});
