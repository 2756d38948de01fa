import type { Schemas } from "@/api/client";
import { RUN_STATUSES } from "@/runs/route";

/** Which runs of a project; those that meet every given condition. */
export interface RunFilter {
  /** A part of it, in any case of letters. */
  name?: string | undefined;
  tag?: string | undefined;
  status?: Schemas["RunStatus"] | undefined;
}

/** Of what an address or a form says; undefined: all runs. */
export function readRunFilter(given: unknown): RunFilter | undefined {
  if (typeof given !== "object" || given === null) return undefined;
  const { name, tag, status } = given as Record<string, unknown>;
  const filter: RunFilter = {};
  if (text(name)) filter.name = text(name);
  if (text(tag)) filter.tag = text(tag);
  const known = RUN_STATUSES.find((each) => each === status);
  if (known) filter.status = known;
  return Object.keys(filter).length === 0 ? undefined : filter;
}

function text(value: unknown): string {
  return typeof value === "string" || typeof value === "number" ? String(value).trim() : "";
}

/** The names of those that match. */
export function matching(runs: readonly Schemas["RunView"][], { name, tag, status }: RunFilter): string[] {
  const part = name?.toLowerCase();
  return runs
    .filter(
      (run) =>
        (part === undefined || run.name.toLowerCase().includes(part)) &&
        (tag === undefined || (run.tags ?? []).includes(tag)) &&
        (status === undefined || run.status === status),
    )
    .map((run) => run.name);
}
