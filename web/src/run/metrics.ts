import type { Schemas } from "@/api/client";
import type { PlotSeries } from "@/components/plot/Plot";
import { formatCount } from "@/format/numbers";
import { byAttempt, isOnLineage, type Lineage } from "./timeline/lanes";

type CheckpointView = Schemas["CheckpointView"];

/** So many abandoned branches have a line of their own, the newest ones. */
const MOST_BRANCHES = 4;
const BRANCH_COLORS = ["#c2410c", "#7c3aed", "#0f766e", "#a16207"];

/** Those that the run's jobs have measured, and those that committed checkpoints carry; losses first, for a run is
 * mostly read by its loss. */
export function metricNames(checkpoints: readonly CheckpointView[], measured: readonly string[] = []): string[] {
  const names = new Set([...measured, ...checkpoints.flatMap((each) => Object.keys(each.metrics))]);
  const isLoss = (name: string) => (name.toLowerCase().includes("loss") ? 0 : 1);
  return [...names].sort((a, b) => isLoss(a) - isLoss(b) || a.localeCompare(b));
}

export interface Curve {
  x: number[];
  series: PlotSeries[];
  /** What a line does not show: its extremes, and the values that are not finite. */
  words: string;
}

/** A metric after a step; null: it was not finite. */
type Value = Pick<Schemas["MetricPoint"], "step" | "value" | "nonfinite">;

/** The values of a metric over steps. `points`: what the run's jobs have measured along its lineage, a line, on which
 * the checkpoints are dots. Undefined: only checkpoints carry it. Then theirs are a line for the lineage, and one for
 * what each of the newest attempts lost. A value that is not finite is a gap. */
export function curveOf(
  checkpoints: readonly CheckpointView[],
  metric: string,
  lineage: Lineage,
  points?: readonly Value[],
): Curve {
  const carrying = checkpoints.filter((each) => each.committed_at !== null && each.metrics[metric] !== undefined);
  const carried = ({ step, metrics }: CheckpointView): Value => ({ step, value: null, ...metrics[metric] });
  const kept = carrying.filter((each) => isOnLineage(lineage, each)).map(carried);
  const drawn: (Omit<PlotSeries, "values"> & { of: readonly Value[] })[] = [];
  if (points === undefined) {
    drawn.push({ label: metric, of: kept });
    const lost = byAttempt(carrying.filter((each) => !isOnLineage(lineage, each)));
    const branches = [...lost.keys()].sort((a, b) => b - a).slice(0, MOST_BRANCHES);
    for (const [index, attempt] of branches.entries()) {
      const label = `${metric}, attempt ${attempt}, not on the lineage`;
      drawn.push({ label, of: (lost.get(attempt) ?? []).map(carried), color: BRANCH_COLORS[index] as string });
    }
  } else {
    drawn.push({ label: metric, of: points }, { label: `${metric} of checkpoints`, of: kept, dots: true });
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
  return { x, series, words: inWords(points ?? kept) };
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
