import type { Schemas } from "@/api/client";

type AttemptView = Schemas["AttemptView"];
type CheckpointView = Schemas["CheckpointView"];

/** The attempt and step of a checkpoint. */
export interface Point {
  attempt: number;
  step: number;
}

/** The last step that the run still has of each attempt on its lineage; null: all of them. Others are not in it. */
export type Lineage = ReadonlyMap<number, number | null>;

/** One attempt over the steps. */
export interface Lane {
  attempt: AttemptView;
  /** The step whose state it went on from; its first own step is the next one. */
  base: number;
  /** Up to here its steps are on the lineage; `base`: none is. */
  keptTo: number;
  /** The largest step that it is known to have reached. */
  last: number;
  /** Where it went on from. Null: from nothing, or it is not known. */
  parent: Point | null;
  onLineage: boolean;
  /** Nothing tells where on the axis it was: it resumed from nothing and ended no step. */
  isUnplaced: boolean;
  checkpoints: CheckpointView[];
}

/** From the newest attempt that has run back to the first, by what each resumed from: as the service reckons goodput. */
export function findLineage(attempts: readonly AttemptView[], resumedFrom: ReadonlyMap<string, Point>): Lineage {
  const byNumber = new Map(attempts.map((each) => [each.number, each]));
  const newestFirst = [...attempts].sort((a, b) => b.number - a.number);
  let attempt = newestFirst.find((each) => each.resumed_from !== null || each.last_step !== null);
  let limit: number | null = null;
  const found = new Map<number, number | null>();
  while (attempt !== undefined && !found.has(attempt.number)) {
    found.set(attempt.number, limit);
    const parent = attempt.resumed_from === null ? undefined : resumedFrom.get(attempt.resumed_from);
    if (parent === undefined || parent.attempt >= attempt.number) break;
    limit = parent.step;
    attempt = byNumber.get(parent.attempt);
  }
  return found;
}

export function isOnLineage(lineage: Lineage, checkpoint: CheckpointView): boolean {
  const limit = lineage.get(checkpoint.attempt);
  return limit !== undefined && !checkpoint.detached && (limit === null || checkpoint.step <= limit);
}

export function byAttempt(checkpoints: readonly CheckpointView[]): Map<number, CheckpointView[]> {
  const found = new Map<number, CheckpointView[]>();
  for (const each of checkpoints) {
    const others = found.get(each.attempt);
    if (others === undefined) found.set(each.attempt, [each]);
    else others.push(each);
  }
  return found;
}

/** The attempts as lanes, the newest first. `resumedFrom`: points by the checkpoint's id; `bases`: the step that an
 * attempt resumed from, where its checkpoint is not known any more. */
export function makeLanes(
  attempts: readonly AttemptView[],
  checkpoints: readonly CheckpointView[],
  resumedFrom: ReadonlyMap<string, Point>,
  bases: ReadonlyMap<number, number>,
): Lane[] {
  const lineage = findLineage(attempts, resumedFrom);
  const ofAttempt = byAttempt(checkpoints);
  return [...attempts]
    .sort((a, b) => b.number - a.number)
    .map((attempt) => {
      const saved = ofAttempt.get(attempt.number) ?? [];
      const parent = (attempt.resumed_from && resumedFrom.get(attempt.resumed_from)) || null;
      const first = attempt.first_step == null ? 0 : Math.max(0, attempt.first_step - 1);
      const base = parent?.step ?? bases.get(attempt.number) ?? first;
      const last = Math.max(base, attempt.last_step ?? base, ...saved.map((each) => each.step));
      const limit = lineage.get(attempt.number);
      const keptTo = limit === undefined ? base : Math.max(base, Math.min(last, limit ?? last));
      const isUnplaced = attempt.resumed_from === null && attempt.last_step === null && saved.length === 0;
      return { attempt, base, keptTo, last, parent, onLineage: limit !== undefined, isUnplaced, checkpoints: saved };
    });
}

/** The steps of all lanes, or those that were asked for; never empty. */
export function stepsOf(lanes: readonly Lane[], from?: number, to?: number): [number, number] {
  const first = from ?? Math.min(...lanes.map((lane) => lane.base), Number.POSITIVE_INFINITY);
  const last = to ?? Math.max(...lanes.map((lane) => lane.last), Number.NEGATIVE_INFINITY);
  const start = Number.isFinite(first) ? first : 0;
  return [start, Math.max(start + 1, Number.isFinite(last) ? last : start + 1)];
}

export type MarkKind = "restore-point" | "committed" | "unhealthy" | "uploading" | "aborted" | "deleted";

/** Checkpoints that would be drawn on the same spot. */
export interface Mark {
  kind: MarkKind;
  from: number;
  to: number;
  checkpoints: CheckpointView[];
}

export function kindOf(checkpoint: CheckpointView, restorePoint: string | undefined): MarkKind {
  if (checkpoint.id === restorePoint) return "restore-point";
  if (checkpoint.state === "uploading" || checkpoint.state === "aborted") return checkpoint.state;
  if (checkpoint.state !== "committed") return "deleted";
  return checkpoint.health === "ok" ? "committed" : "unhealthy";
}

/** The later ones are drawn over the others. */
const DRAWN: MarkKind[] = ["deleted", "aborted", "uploading", "committed", "unhealthy", "restore-point"];

/** At most one mark of a kind for each `grain` steps, so that a lane of 100,000 checkpoints has as many as it has room. */
export function marksOf(
  checkpoints: readonly CheckpointView[],
  grain: number,
  restorePoint: string | undefined,
): Mark[] {
  const marks = new Map<string, Mark>();
  for (const checkpoint of checkpoints) {
    const kind = kindOf(checkpoint, restorePoint);
    const spot = `${kind} ${Math.floor(checkpoint.step / grain)}`;
    const mark = marks.get(spot) ?? { kind, from: checkpoint.step, to: checkpoint.step, checkpoints: [] };
    mark.from = Math.min(mark.from, checkpoint.step);
    mark.to = Math.max(mark.to, checkpoint.step);
    mark.checkpoints.push(checkpoint);
    marks.set(spot, mark);
  }
  return [...marks.values()].sort((a, b) => DRAWN.indexOf(a.kind) - DRAWN.indexOf(b.kind) || a.from - b.from);
}

/** Round steps for an axis: at most `most` of them. */
export function ticksOf([first, last]: readonly [number, number], most: number): number[] {
  const rough = Math.max(1, (last - first) / Math.max(1, most));
  const ten = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 5, 10].map((each) => each * ten).find((each) => each >= rough) ?? rough;
  const found: number[] = [];
  for (let step = Math.ceil(first / every) * every; step <= last; step += every) found.push(step);
  return found;
}
