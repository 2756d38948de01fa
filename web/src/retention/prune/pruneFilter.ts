import type { Schemas } from "@/api/client";
import { formatCount } from "@/format/numbers";

type PruneFilter = Schemas["PruneFilter"];

export const HEALTHS: readonly Schemas["Health"][] = ["ok", "diverged", "corrupt", "quarantined"];

/** What the form's fields hold. */
export interface FilterFields {
  fromStep: string;
  beforeStep: string;
  attempt: string;
  /** 90min, 12h, 7d, 4w */
  olderThan: string;
  /** With commas between. */
  labels: string;
  health: Schemas["Health"][];
}

const UNITS: readonly (readonly [string, number])[] = [
  ["w", 7 * 86_400],
  ["d", 86_400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
];

export function fieldsOfFilter(filter: PruneFilter): FilterFields {
  return {
    fromStep: textOf(filter.from_step),
    beforeStep: textOf(filter.before_step),
    attempt: textOf(filter.attempt),
    olderThan: filter.older_than_seconds == null ? "" : ageOf(filter.older_than_seconds),
    labels: (filter.labels ?? []).join(", "),
    health: filter.health ?? [],
  };
}

/** The filter, or what is wrong with a field: then nothing may be asked, for a condition that is left out matches more. */
export function filterOf(fields: FilterFields): PruneFilter | string {
  const filter: PruneFilter = {};
  for (const [name, field, text] of [
    ["From step", "from_step", fields.fromStep],
    ["Before step", "before_step", fields.beforeStep],
    ["Attempt", "attempt", fields.attempt],
  ] as const) {
    if (text.trim() === "") continue;
    if (!/^\d{1,15}$/.test(text.trim())) return `${name} must be a whole number.`;
    filter[field] = Number(text);
  }
  if (fields.olderThan.trim() !== "") {
    const found = /^(\d{1,9})(w|d|h|min|s)$/.exec(fields.olderThan.trim());
    if (found === null) return "Older than must be a number with its unit: 12h, 7d or 4w.";
    filter.older_than_seconds = Number(found[1]) * sizeOf(found[2]);
  }
  const labels = fields.labels
    .split(",")
    .map((label) => label.trim())
    .filter(Boolean);
  if (labels.length > 0) filter.labels = labels;
  if (fields.health.length > 0) filter.health = fields.health;
  return filter;
}

/** For a line: "before step 50; diverged". */
export function filterInWords(filter: PruneFilter): string {
  const { from_step, before_step, attempt, older_than_seconds, labels = [], health = [] } = filter;
  const said = [
    from_step != null && `from step ${formatCount(from_step)}`,
    before_step != null && `before step ${formatCount(before_step)}`,
    attempt != null && `attempt ${attempt}`,
    older_than_seconds != null && `committed longer ago than ${ageOf(older_than_seconds)}`,
    labels.length > 0 && `label ${labels.join(" or ")}`,
    health.length > 0 && health.join(" or "),
  ].filter(Boolean);
  return said.length === 0 ? "no condition was given" : said.join("; ");
}

function textOf(value: number | null | undefined): string {
  return value == null ? "" : String(value);
}

function sizeOf(unit: string | undefined): number {
  return UNITS.find(([name]) => name === unit)?.[1] ?? 1;
}

/** Exactly: what is rounded up would be said of more than what matches. */
function ageOf(seconds: number): string {
  const [unit, size] = UNITS.find(([, each]) => seconds % each === 0) ?? ["s", 1];
  return `${seconds / size}${unit}`;
}
