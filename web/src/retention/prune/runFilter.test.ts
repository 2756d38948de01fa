import type { Schemas } from "@/api/client";
import { matching, readRunFilter } from "./runFilter";

const run = (name: string, status: Schemas["RunStatus"], tags: string[]) =>
  ({ name, status, tags }) as Partial<Schemas["RunView"]> as Schemas["RunView"];
const RUNS = [
  run("Llama-7b", "finished", ["paper"]),
  run("llama-70b", "failed", ["paper", "big"]),
  run("vit", "failed", []),
];

it("finds the runs that meet every condition, and all without one", () => {
  expect(matching(RUNS, {})).toEqual(["Llama-7b", "llama-70b", "vit"]);
  expect(matching(RUNS, { name: "LLAMA" })).toEqual(["Llama-7b", "llama-70b"]);
  expect(matching(RUNS, { tag: "paper", status: "failed" })).toEqual(["llama-70b"]);
  expect(matching(RUNS, { tag: "pap" })).toEqual([]);
});

it("reads of an address what it knows, and takes nothing for no condition", () => {
  expect(readRunFilter({ name: " llama ", tag: 7, status: "failed", more: 1 })).toEqual({
    name: "llama",
    tag: "7",
    status: "failed",
  });
  expect(readRunFilter({ name: " ", status: "unheard of" })).toBeUndefined();
  expect(readRunFilter("all")).toBeUndefined();
});
