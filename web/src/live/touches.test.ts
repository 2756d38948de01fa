import { touches } from "./touches";

const key = (path: string, asked: object = {}) => ["get", path, { params: { path: asked } }] as const;
const RUNS = "/v1/projects/{project}/runs";
const CHECKPOINTS = "/v1/projects/{project}/runs/{run}/checkpoints";

it("touches the lists and the rows of what an event is about", () => {
  const data = { project: "p", run: "r", checkpoint_id: "ck" };
  expect(touches("checkpoint.committed", data, key(RUNS, { project: "p" }))).toBe(true);
  expect(touches("checkpoint.committed", data, key(CHECKPOINTS, { project: "p", run: "r" }))).toBe(true);
  expect(touches("checkpoint.trashed", data, key("/v1/checkpoints/{checkpoint_id}", { checkpoint_id: "ck" }))).toBe(
    true,
  );
});

it("leaves other projects, runs, checkpoints and nouns alone", () => {
  const data = { project: "p", run: "r", checkpoint_id: "ck" };
  expect(touches("checkpoint.committed", data, key(RUNS, { project: "q" }))).toBe(false);
  expect(touches("checkpoint.committed", data, key(CHECKPOINTS, { project: "p", run: "s" }))).toBe(false);
  expect(touches("checkpoint.trashed", data, key("/v1/checkpoints/{checkpoint_id}", { checkpoint_id: "x" }))).toBe(
    false,
  );
  expect(touches("checkpoint.committed", data, key("/v1/prices"))).toBe(false);
  expect(touches("checkpoint.committed", data, ["session"])).toBe(false);
});

it("leaves the lists of all projects to the clock", () => {
  const data = { project: "p", run: "r", checkpoint_id: "ck" };
  const all = (path: string) => ["get", path, { params: { query: { limit: 100 } } }, "pages"] as const;
  expect(touches("run.stalled", data, all("/v1/runs"))).toBe(false);
  expect(touches("checkpoint.corrupt", data, all("/v1/checkpoints"))).toBe(false);
});

it("touches the list of events with each, also with one of a newer service", () => {
  expect(touches("run.renamed", { project: "p" }, ["get", "/v1/events", { params: { query: { project: "p" } } }])).toBe(
    true,
  );
});
