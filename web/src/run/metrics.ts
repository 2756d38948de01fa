import type { Schemas } from "@/api/client";
import type { PlotSeries } from "@/components/plot/Plot";
import { formatCount } from "@/format/numbers";
import { byAttempt, isOnLineage, type Lineage } from "./timeline/lanes";

type CheckpointView = Schemas["CheckpointView"];

/** So many branches that the run has left have a line of their own, the newest ones. */
const MOST_BRANCHES = 4;
const BRANCH_COLORS = ["#c2410c", "#7c3aed", "#0f766e", "#a16207"];

/** Those that the run's jobs have measured, and those that committed checkpoints carry; losses first, for a run is
 * mostly read by its loss. */
export function metricNames(checkpoints: readonly CheckpointView[], measured: readonly string[] = []): string[] {
  const names = new Set([...measured, ...checkpoints.flatMap((each) => Object.keys(each.metrics))]);
  const isLoss = (name: string) => (name.toLowerCase().includes("loss") ? 0 : 1);
  return [...names].sort((a, b) => isLoss(a) - isLoss(b) || a.localeCompare(b));
}

/** The steps of an attempt that are not on the run's lineage: from this one on. */
export interface Branch {
  attempt: number;
  from: number;
}

/** The newest attempts that ran steps which the run has left. `segments`: its lineage, as the service tells it. */
export function branchesOf(
  attempts: readonly Pick<Schemas["AttemptView"], "number" | "last_step">[],
  segments: readonly Schemas["CurveSegment"][],
): Branch[] {
  const lineage = new Map(segments.map((each) => [each.attempt, each.max_step]));
  return attempts
    .flatMap(({ number, last_step: last }): Branch[] => {
      const limit = lineage.get(number);
      if (last === null || limit === null || (limit !== undefined && last <= limit)) return [];
      return [{ attempt: number, from: limit === undefined ? 0 : limit + 1 }];
    })
    .sort((a, b) => b.attempt - a.attempt)
    .slice(0, MOST_BRANCHES);
}

export interface Curve {
  x: number[];
  series: PlotSeries[];
  /** What a line does not show: its extremes, and the values that are not finite. */
  words: string;
}

/** A metric after a step; null: it was not finite. */
type Value = Pick<Schemas["MetricPoint"], "step" | "value" | "nonfinite">;

/** The values of a metric over steps: a line for the lineage, and one for what each of the newest attempts lost.
 * `points`: what the run's jobs have measured along its lineage; the checkpoints are dots on it. Undefined: only
 * checkpoints carry the metric, and the line is theirs. `left`: what attempts have measured on branches that the run has
 * left; of one that is not in it the checkpoints are the line. A value that is not finite is a gap. A line goes through
 * the checkpoints at steps of which nothing was measured, too: a job that was killed has not told its last steps. */
export function curveOf(
  checkpoints: readonly CheckpointView[],
  metric: string,
  lineage: Lineage,
  points?: readonly Value[],
  left: ReadonlyMap<number, readonly Value[]> = new Map(),
): Curve {
  const carrying = checkpoints.filter((each) => each.committed_at !== null && each.metrics[metric] !== undefined);
  const carried = ({ step, metrics }: CheckpointView): Value => ({ step, value: null, ...metrics[metric] });
  const kept = carrying.filter((each) => isOnLineage(lineage, each)).map(carried);
  const line = points === undefined ? kept : through(points, kept);
  const drawn: (Omit<PlotSeries, "values"> & { of: readonly Value[] })[] = [];
  drawn.push({ label: metric, of: line });
  if (points !== undefined) drawn.push({ label: `${metric} of checkpoints`, of: kept, dots: true });
  const lost = new Map<number, readonly Value[]>();
  for (const [attempt, of] of byAttempt(carrying.filter((each) => !isOnLineage(lineage, each)))) {
    lost.set(attempt, of.map(carried));
  }
  for (const [attempt, of] of left) lost.set(attempt, through(of, lost.get(attempt) ?? []));
  const branches = [...lost]
    .filter(([, of]) => of.length > 0)
    .sort(([a], [b]) => b - a)
    .slice(0, MOST_BRANCHES);
  for (const [index, [attempt, of]] of branches.entries()) {
    const label = `${metric}, attempt ${attempt}, not on the lineage`;
    drawn.push({ label, of, color: BRANCH_COLORS[index] as string });
  }
  const x = [...new Set(drawn.flatMap(({ of }) => of.map(({ step }) => step)))].sort((a, b) => a - b);
  const at = new Map(x.map((step, index) => [step, index]));
  const series = drawn
    .filter(({ of }) => of.length > 0)
    .map(({ of, ...look }): PlotSeries => {
      // undefined: this line has no point here and goes on. null: a gap.
      const values: PlotSeries["values"] = new Array(x.length).fill(undefined);
      for (const { step, value } of of) values[at.get(step) ?? 0] = value;
      return { ...look, values, format };
    });
  return { x, series, words: inWords(line) };
}

/** What was measured, and what checkpoints carry at the other steps. */
function through(measured: readonly Value[], carried: readonly Value[]): Value[] {
  const steps = new Set(measured.map(({ step }) => step));
  return [...measured, ...carried.filter(({ step }) => !steps.has(step))];
}

/** So many values that are not finite are told one by one. */
const MOST_TOLD = 3;

function inWords(values: readonly Value[]): string {
  const finite = values.flatMap(({ step, value }) => (value == null ? [] : [{ step, value }]));
  const others = values.filter(({ value }) => value == null).sort((a, b) => a.step - b.step);
  const told: string[] = [];
  const [first] = finite;
  if (first !== undefined) {
    const least = finite.reduce((a, b) => (b.value < a.value ? b : a), first);
    const greatest = finite.reduce((a, b) => (b.value > a.value ? b : a), first);
    const say = ({ step, value }: typeof first) => `${format(value)} at step ${formatCount(step)}`;
    told.push(`Least ${say(least)}, greatest ${say(greatest)}.`);
  }
  if (others.length > 0) {
    const some = others.slice(0, MOST_TOLD).map(({ step, nonfinite }) => `${nonfinite} at step ${formatCount(step)}`);
    const more = others.length - some.length;
    told.push(`Not finite: ${some.join(", ")}${more > 0 ? ` and ${formatCount(more)} more` : ""}.`);
  }
  return told.join(" ");
}

function format(value: number): string {
  return Number(value.toPrecision(5)).toString();
}
