import { queryClient, type Schemas } from "@/api/client";

/** How often running work is asked about, and other work that no event tells of. */
export const WHILE_RUNNING_MS = 2000;
export const OTHERWISE_MS = 15_000;
/** For `usePages` and `useWhole` of what mostly an event tells of, and not always: a new attempt and a repair make none. */
export const ASKED_AGAIN = { askedAgainAfter: () => 60_000 };

/** For what no event tells of, by whether work on it is under way: what was at rest may have begun. */
export function askedAgain(isUnderWay: boolean): number {
  return isUnderWay ? OTHERWISE_MS : ASKED_AGAIN.askedAgainAfter();
}

/** Asks again for all replies of these paths. */
export function refresh(...paths: string[]): Promise<unknown> {
  return Promise.all(paths.map((path) => queryClient.invalidateQueries({ queryKey: ["get", path] })));
}

export const isOver = (of: Schemas["OperationView"]) => of.ended_at !== null;

/** For `usePages` of operations: one that runs is followed to its end. */
export function followed(operations: readonly Schemas["OperationView"][]): number {
  return operations.every(isOver) ? OTHERWISE_MS : WHILE_RUNNING_MS;
}
