import type { Schemas } from "@/api/client";

/** Whether the second store lacks a run's newer states for longer than its objective (RPO) allows. */
export function isLate(of: Schemas["RunCopies"]): boolean {
  return of.rpo_objective_seconds != null && (of.rpo_seconds ?? 0) > of.rpo_objective_seconds;
}

/** What a drill measures: the time that the restore took, and how far its state was behind the newest commit. By the
 * fields of its result; beside each stands the objective of its day, if there was one. */
export const MEASURED = [
  { name: "RTO", id: "seconds", objective: "rto_objective_seconds", header: "Restored in (RTO)" },
  { name: "RPO", id: "rpo_seconds", objective: "rpo_objective_seconds", header: "Behind by (RPO)" },
] as const;

export interface Missed {
  name: "RTO" | "RPO";
  value: number;
  objective: number;
}

/** The objectives that a drill has not met. */
export function missedBy({ result }: Schemas["OperationView"]): Missed[] {
  return MEASURED.flatMap(({ name, id, objective: field }) => {
    const [value, objective] = [result?.[id], result?.[field]];
    return typeof value === "number" && typeof objective === "number" && value > objective
      ? [{ name, value, objective }]
      : [];
  });
}
