import type { Schemas } from "@/api/client";

type PruneFilter = Schemas["PruneFilter"];

export const HEALTHS: readonly Schemas["Health"][] = ["ok", "diverged", "corrupt", "quarantined"];

/** What the form's fields hold. */
export interface FilterFields {
  fromStep: string;
  beforeStep: string;
  attempt: string;
  /** 12h, 7d, 4w */
  olderThan: string;
  /** With commas between. */
  labels: string;
  health: Schemas["Health"][];
}

const UNITS: Record<string, number> = { h: 3600, d: 86_400, w: 7 * 86_400 };

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
    const found = /^(\d{1,6})([hdw])$/.exec(fields.olderThan.trim());
    if (found === null) return "Older than must be a number with its unit: 12h, 7d or 4w.";
    filter.older_than_seconds = Number(found[1]) * (UNITS[found[2] ?? ""] ?? 0);
  }
  const labels = fields.labels
    .split(",")
    .map((label) => label.trim())
    .filter(Boolean);
  if (labels.length > 0) filter.labels = labels;
  if (fields.health.length > 0) filter.health = fields.health;
  return filter;
}

function textOf(value: number | null | undefined): string {
  return value == null ? "" : String(value);
}

function ageOf(seconds: number): string {
  const unit = seconds % 604_800 === 0 ? "w" : seconds % 86_400 === 0 ? "d" : "h";
  return `${Math.round(seconds / (UNITS[unit] ?? 3600))}${unit}`;
}
