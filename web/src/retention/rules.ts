/** A retention policy as the API has it. The service checks it, and says in a sentence what is wrong. */
export type PolicyDocument = Record<string, unknown>;

export interface Rule {
  field: string;
  label: string;
  /** For example. */
  example: string;
}

/** The newest one of each of the last n periods that have one, and how many of the newest are kept. */
export const COUNTS: readonly Rule[] = [
  { field: "keep_last", label: "Newest", example: "5" },
  { field: "keep_hourly", label: "Hours", example: "24" },
  { field: "keep_daily", label: "Days", example: "7" },
  { field: "keep_weekly", label: "Weeks", example: "4" },
  { field: "keep_monthly", label: "Months", example: "12" },
  { field: "keep_yearly", label: "Years", example: "3" },
];

/** Spans, back from the newest checkpoint. */
export const SPANS: readonly Rule[] = [
  { field: "keep_within", label: "Every one within", example: "6h" },
  { field: "keep_within_hourly", label: "One an hour within", example: "2d" },
  { field: "keep_within_daily", label: "One a day within", example: "7d" },
  { field: "keep_within_weekly", label: "One a week within", example: "3m" },
  { field: "keep_within_monthly", label: "One a month within", example: "1y" },
  { field: "keep_within_yearly", label: "One a year within", example: "5y" },
];

export interface BestFields {
  metric: string;
  mode: "min" | "max";
  n: string;
}

/** What the form's fields hold. */
export interface RuleFields {
  /** By the policy's field; of counts, spans and keep_every_steps. */
  single: Record<string, string>;
  best: BestFields[];
  /** With commas between. */
  labels: string;
}

const SINGLE = [...COUNTS, ...SPANS].map((rule) => rule.field).concat("keep_every_steps");
const KNOWN = new Set([...SINGLE, "keep_best", "keep_labels"]);

export function fieldsOf(document: PolicyDocument): RuleFields {
  const single: Record<string, string> = {};
  for (const field of SINGLE) {
    const value = document[field];
    if (value != null) single[field] = String(value);
  }
  const given = document.keep_best;
  const best = Array.isArray(given) ? given : given == null ? [] : [given];
  return {
    single,
    best: best.map((each: { metric?: unknown; mode?: unknown; n?: unknown }) => ({
      metric: String(each.metric ?? ""),
      mode: each.mode === "max" ? "max" : "min",
      n: String(each.n ?? 1),
    })),
    labels: Array.isArray(document.keep_labels) ? document.keep_labels.join(", ") : "",
  };
}

/** The policy that the fields say. What no field holds, a newer service's rule for example, stays as it was in `base`. */
export function documentOf(fields: RuleFields, base: PolicyDocument): PolicyDocument {
  const document: PolicyDocument = Object.fromEntries(Object.entries(base).filter(([name]) => !KNOWN.has(name)));
  for (const field of SINGLE) {
    const text = fields.single[field]?.trim() ?? "";
    if (text !== "") document[field] = SPANS.some((rule) => rule.field === field) ? text : numberOr(text);
  }
  const best = fields.best.filter((each) => each.metric.trim() !== "");
  if (best.length > 0) {
    document.keep_best = best.map(({ metric, mode, n }) => ({
      metric: metric.trim(),
      ...(mode === "max" ? { mode } : {}),
      ...(n.trim() === "1" ? {} : { n: numberOr(n.trim()) }),
    }));
  }
  const labels = fields.labels
    .split(",")
    .map((label) => label.trim())
    .filter(Boolean);
  if (labels.length > 0) document.keep_labels = labels;
  return document;
}

/** What is no number goes to the service as it is written: it says what a number may be. */
export function numberOr(text: string): number | string {
  return /^\d{1,15}$/.test(text) ? Number(text) : text;
}

/** Whether two policies say the same, in whatever order. */
export function sameRules(one: PolicyDocument, other: PolicyDocument): boolean {
  return canonical(one) === canonical(other);
}

function canonical(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonical).join()}]`;
  if (typeof value !== "object" || value === null) return JSON.stringify(value) ?? "";
  const entries = Object.entries(value).sort(([one], [other]) => (one < other ? -1 : 1));
  return `{${entries.map(([name, each]) => `${JSON.stringify(name)}:${canonical(each)}`).join()}}`;
}

/** In words, for a line: "keep_last 5, keep_within 6h". */
export function rulesInWords(document: PolicyDocument): string {
  const fields = fieldsOf(document);
  return [
    ...Object.entries(fields.single).map(([field, value]) => `${field} ${value}`),
    ...fields.best.map(({ metric, mode, n }) => `keep_best ${n} by ${metric} (${mode})`),
    ...(fields.labels ? [`keep_labels ${fields.labels}`] : []),
  ].join(", ");
}
