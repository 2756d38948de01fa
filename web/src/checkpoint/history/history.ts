import type { Schemas } from "@/api/client";

type AuditEvent = Schemas["AuditEventView"];

export interface Change {
  field: string;
  before: string;
  after: string;
}

/** Field by field, what an audit event changed. Of metrics and other maps: each entry by itself. */
export function changesOf(event: Pick<AuditEvent, "before" | "after">): Change[] {
  const before = event.before ?? {};
  const after = event.after ?? {};
  const fields = [...new Set([...Object.keys(before), ...Object.keys(after)])];
  return fields.flatMap((field) => {
    const then = before[field];
    const now = after[field];
    if (isMap(then) && isMap(now)) {
      return changesOf({ before: then, after: now }).map((each) => ({ ...each, field: `${field}.${each.field}` }));
    }
    const change = { field, before: inWords(then), after: inWords(now) };
    return change.before === change.after ? [] : [change];
  });
}

/** Whether the event says something of the checkpoint's health. */
export function isOfHealth(event: AuditEvent): boolean {
  return event.action === "checkpoint.quarantine" || "health" in (event.after ?? {});
}

/** A metric is a map as well, but one value. */
function isMap(value: unknown): value is Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return false;
  return !("value" in value || "nonfinite" in value);
}

function inWords(value: unknown): string {
  if (value === undefined || value === null) return "nothing";
  if (typeof value === "object" && !Array.isArray(value)) {
    const metric = value as { value?: unknown; nonfinite?: unknown };
    const said = metric.nonfinite ?? metric.value;
    if (said !== undefined && said !== null) return String(said);
  }
  if (Array.isArray(value)) return value.length === 0 ? "nothing" : value.map(inWords).join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
