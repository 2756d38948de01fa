import { keepPreviousData } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useEffect, useMemo } from "react";
import type uPlot from "uplot";
import { type Pages, type Schemas, useQuery } from "@/api/client";
import { Plot } from "@/components/plot/Plot";
import { ErrorState, Loading } from "@/components/states";
import { curveOf, metricNames } from "./metrics";
import { findLineage, type Lineage, type Point } from "./timeline/lanes";
import type { Inset } from "./timeline/Timeline";

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

/** A metric over steps: what the run's jobs measured after each, and the values that its checkpoints carry. */
export function MetricCurve(props: MetricCurveProps) {
  const { checkpoints, attempts, resumedFrom, steps, onInset } = props;
  const { metric } = useSearch({ from: "/runs/$run" });
  const navigate = useNavigate({ from: "/runs/$run" });
  // Each reply names all metrics that have points. Mostly both are the same query.
  const measured = useMeasured(props, metric ?? LIKELY).data?.names;
  const names = useMemo(() => metricNames(checkpoints.items, measured), [checkpoints.items, measured]);
  const chosen = metric !== undefined && names.includes(metric) ? metric : names[0];
  const history = useMeasured(props, chosen ?? metric ?? LIKELY);
  // By its content: each heartbeat gives new attempts, and another curve would take the cursor and a drag out of the plot.
  const lineage = JSON.stringify([...findLineage(attempts, resumedFrom)]);
  const curve = useMemo(() => {
    if (chosen === undefined) return undefined;
    const hasPoints = measured?.includes(chosen);
    const points = hasPoints ? (history.data?.metrics.find(({ name }) => name === chosen)?.points ?? []) : undefined;
    return curveOf(checkpoints.items, chosen, new Map(JSON.parse(lineage)) as Lineage, points);
  }, [checkpoints.items, chosen, measured, history.data, lineage]);
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
    "/v1/projects/{project}/runs/{run}/metrics-history",
    { params: { path: { project, run }, query } },
    { placeholderData: keepPreviousData, refetchInterval: askedAgainAfter },
  );
}
