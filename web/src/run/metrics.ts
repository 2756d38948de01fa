import type { Schemas } from "@/api/client";
import type { PlotSeries } from "@/components/plot/Plot";
import { byAttempt, isOnLineage, type Lineage } from "./timeline/lanes";

type CheckpointView = Schemas["CheckpointView"];

/** So many abandoned branches have a line of their own, the newest ones. */
const MOST_BRANCHES = 4;
const BRANCH_COLORS = ["#c2410c", "#7c3aed", "#0f766e", "#a16207"];

/** Those that committed checkpoints carry; losses first, for a run is mostly read by its loss. */
export function metricNames(checkpoints: readonly CheckpointView[]): string[] {
  const names = new Set(checkpoints.flatMap((each) => Object.keys(each.metrics)));
  const isLoss = (name: string) => (name.toLowerCase().includes("loss") ? 0 : 1);
  return [...names].sort((a, b) => isLoss(a) - isLoss(b) || a.localeCompare(b));
}

export interface Curve {
  x: number[];
  series: PlotSeries[];
}

/** The values of a metric over steps: a line for the lineage, and one for what each of the newest attempts lost. A
 * value that is not finite is a gap. */
export function curveOf(checkpoints: readonly CheckpointView[], metric: string, lineage: Lineage): Curve {
  const measured = checkpoints.filter((each) => each.committed_at !== null && each.metrics[metric] !== undefined);
  const kept = measured.filter((each) => isOnLineage(lineage, each));
  const lost = byAttempt(measured.filter((each) => !isOnLineage(lineage, each)));
  const branches = [...lost.keys()].sort((a, b) => b - a).slice(0, MOST_BRANCHES);
  const drawn = [kept, ...branches.map((attempt) => lost.get(attempt) ?? [])];
  const x = [...new Set(drawn.flat().map((each) => each.step))].sort((a, b) => a - b);
  const at = new Map(x.map((step, index) => [step, index]));
  const series = drawn.map((points, index): PlotSeries => {
    // undefined: this line has no point here and goes on. null: a gap.
    const values: PlotSeries["values"] = new Array(x.length).fill(undefined);
    for (const point of points) values[at.get(point.step) ?? 0] = point.metrics[metric]?.value ?? null;
    const label = index === 0 ? metric : `${metric}, attempt ${branches[index - 1]}, not on the lineage`;
    return { label, values, format, ...(index === 0 ? {} : { color: BRANCH_COLORS[index - 1] }) };
  });
  return { x, series: kept.length === 0 ? series.slice(1) : series };
}

function format(value: number): string {
  return Number(value.toPrecision(5)).toString();
}
