import { keepPreviousData, useQueries } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback, useEffect, useMemo } from "react";
import type uPlot from "uplot";
import { type Pages, queryOptions, type Schemas, useQuery } from "@/api/client";
import { Plot } from "@/components/plot/Plot";
import { ErrorState, Loading } from "@/components/states";
import { type Branch, branchesOf, curveOf, metricNames } from "./metrics";
import { findLineage, type Lineage, type Point } from "./timeline/lanes";
import type { Inset } from "./timeline/Timeline";

const HISTORY = "/v1/projects/{project}/runs/{run}/metrics-history";
/** About one for each pixel. The service thins what is more, and keeps the extremes. */
const MOST_POINTS = 1000;
/** Asked for before the run's metrics are known: mostly it is the one. */
const LIKELY = "loss";

interface MetricCurveProps {
  project: string;
  run: string;
  checkpoints: Pages<Schemas["CheckpointView"]>;
  attempts: readonly Schemas["AttemptView"][];
  resumedFrom: ReadonlyMap<string, Point>;
  steps: readonly [number, number];
  /** In milliseconds; false: nothing comes any more. */
  askedAgainAfter: number | false;
  /** Where the plot has its steps. */
  onInset: (inset: Inset | null) => void;
}

/** A metric over steps: what the run's jobs measured after each, also on branches that the run has left, and the values
 * that its checkpoints carry. */
export function MetricCurve(props: MetricCurveProps) {
  const { checkpoints, attempts, resumedFrom, steps, onInset } = props;
  const { metric } = useSearch({ from: "/runs/$run" });
  const navigate = useNavigate({ from: "/runs/$run" });
  // Each reply names all metrics that have points. Mostly both are the same query.
  const measured = useMeasured(props, metric ?? LIKELY).data?.names;
  const names = useMemo(() => metricNames(checkpoints.items, measured), [checkpoints.items, measured]);
  const chosen = metric !== undefined && names.includes(metric) ? metric : names[0];
  const history = useMeasured(props, chosen ?? metric ?? LIKELY);
  const hasPoints = chosen !== undefined && measured?.includes(chosen) === true;
  const left = useLeft(props, history.data?.segments, hasPoints ? chosen : undefined);
  // By its content: each heartbeat gives new attempts, and another curve would take the cursor and a drag out of the plot.
  const lineage = JSON.stringify([...findLineage(attempts, resumedFrom)]);
  const curve = useMemo(() => {
    if (chosen === undefined) return undefined;
    const points = hasPoints ? pointsOf(history.data, chosen) : undefined;
    return curveOf(checkpoints.items, chosen, new Map(JSON.parse(lineage)) as Lineage, points, left);
  }, [checkpoints.items, chosen, hasPoints, history.data, left, lineage]);
  const isShown = curve !== undefined && curve.x.length > 0;

  useEffect(() => {
    if (!isShown) onInset(null);
  }, [isShown, onInset]);

  const hooks = useMemo(
    (): uPlot.Hooks.Arrays => ({
      draw: [
        (plot) => {
          const left = plot.bbox.left / devicePixelRatio;
          const width = plot.bbox.width / devicePixelRatio;
          onInset({ left, width });
        },
      ],
      setSelect: [
        (plot) => {
          if (plot.select.width < 3) return;
          const at = (px: number) => Math.round(plot.posToVal(px, "x"));
          const range = { from: Math.max(0, at(plot.select.left)), to: at(plot.select.left + plot.select.width) };
          void navigate({ search: (old) => ({ ...old, ...range }), resetScroll: false });
        },
      ],
    }),
    [navigate, onInset],
  );

  const isAwaited = (history.isPending || history.isPlaceholderData) && !history.error;
  return (
    <>
      {chosen !== undefined && (
        <label>
          Metric{" "}
          <select
            value={chosen}
            onChange={(event) =>
              void navigate({ search: (old) => ({ ...old, metric: event.target.value }), resetScroll: false })
            }
          >
            {names.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
      {isShown ? (
        <>
          <Plot
            title={`${chosen} over steps`}
            x={curve.x}
            xLabel="Step"
            xRange={steps}
            series={curve.series}
            heightPx={230}
            hooks={hooks}
          />
          {curve.words && <p className="quiet">{curve.words}</p>}
        </>
      ) : checkpoints.isPending || isAwaited ? (
        <Loading what="the metrics" />
      ) : (
        !history.error && (
          <p className="quiet">
            {chosen === undefined ? "No metric of this run is known" : `Nothing is known of ${chosen} in these steps`}.
            Give metrics at each step: <code>ckpt.step(step, state, metrics=…)</code>
          </p>
        )
      )}
      {history.error ? <ErrorState error={history.error} onRetry={() => void history.refetch()} /> : null}
    </>
  );
}

function useMeasured({ project, run, askedAgainAfter }: MetricCurveProps, name: string) {
  const { from, to } = useSearch({ from: "/runs/$run" });
  const query = { name: [name], from_step: from ?? null, to_step: to ?? null, points: MOST_POINTS };
  return useQuery(
    "get",
    HISTORY,
    { params: { path: { project, run }, query } },
    { placeholderData: keepPreviousData, refetchInterval: askedAgainAfter },
  );
}

/** By attempt, what it measured on the branch that the run has left. `name`: undefined if the metric has no points. */
function useLeft(
  { project, run, attempts }: MetricCurveProps,
  segments: readonly Schemas["CurveSegment"][] | undefined,
  name: string | undefined,
) {
  const { from, to } = useSearch({ from: "/runs/$run" });
  // By its content, as the lineage.
  const wanted = JSON.stringify(name === undefined || segments === undefined ? [] : branchesOf(attempts, segments));
  const branches = useMemo(() => JSON.parse(wanted) as Branch[], [wanted]);
  const combine = useCallback(
    (replies: { data?: Schemas["MetricsHistory"] | undefined }[]) =>
      new Map(branches.map(({ attempt }, at) => [attempt, pointsOf(replies[at]?.data, name)])),
    [branches, name],
  );
  return useQueries({
    queries: branches.map((branch) => {
      const steps = { from_step: Math.max(branch.from, from ?? 0), to_step: to ?? null };
      const query = { name: name === undefined ? [] : [name], attempt: branch.attempt, ...steps, points: MOST_POINTS };
      return {
        ...queryOptions("get", HISTORY, { params: { path: { project, run }, query } }),
        staleTime: Number.POSITIVE_INFINITY, // nothing is measured any more where the run has left
      };
    }),
    combine,
  });
}

function pointsOf(history: Schemas["MetricsHistory"] | undefined, metric: string | undefined) {
  return history?.metrics.find(({ name }) => name === metric)?.points ?? [];
}
