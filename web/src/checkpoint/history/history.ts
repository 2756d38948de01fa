import type { Schemas } from "@/api/client";
import { type Change, changesOf, inWords } from "@/format/changes";

type AuditEvent = Schemas["AuditEventView"];

/** Field by field, what an audit event changed. Of metrics and other maps: each entry by itself. */
export function changedBy({ before, after }: Pick<AuditEvent, "before" | "after">): Change[] {
  // One side may leave out what the other says is nothing.
  return changesOf(before, after, { lists: true }).filter((each) => inWords(each.before) !== inWords(each.after));
}

/** Whether the event says something of the checkpoint's health. */
export function isOfHealth(event: AuditEvent): boolean {
  return event.action === "checkpoint.quarantine" || "health" in (event.after ?? {});
}
