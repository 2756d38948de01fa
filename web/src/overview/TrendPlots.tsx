import { useMemo } from "react";
import type { Schemas } from "@/api/client";
import { Plot, type PlotSeries } from "@/components/plot/Plot";
import { formatBytes, formatMoney, formatShare } from "@/format/numbers";
import { changeOf, goodputOf, hoursOf } from "./hours";
import styles from "./Trends.module.css";

type ProjectSample = Schemas["ProjectSample"];

const HEIGHT_PX = 130;
/** The cursor stands at the same hour in all of them. */
const SYNC_KEY = "trends";

/** `samples`: at least one, the newest first. */
export default function TrendPlots({ samples }: { samples: ProjectSample[] }) {
  const { x, plots, missed } = useMemo(() => {
    const { x, samples: hours } = hoursOf(samples);
    const currency = samples[0]?.currency ?? "";
    const line = (label: string, format: (value: number) => string, of: (each: ProjectSample) => number | null) => {
      const values = hours.map((each) => each && of(each));
      return { series: [{ label, values, format }] satisfies PlotSeries[], format, values };
    };
    const share = goodputOf(samples);
    const goodput = line("Goodput", formatShare, (each) => each.goodput);
    const bytes = line("Stored", formatBytes, (each) => each.stored_bytes);
    // Prices may have changed their currency since: two in one line would not compare.
    const cost = line(
      "Per month",
      (value) => formatMoney(value, currency),
      (each) => (each.currency === currency ? each.per_month : null),
    );
    const told = ({ values, format }: typeof bytes) => {
      const known = values.filter((value) => value !== null);
      return `${format(known.at(-1) ?? 0)}, ${changeOf(known, format) ?? "no change"}`;
    };
    return {
      x,
      plots: [
        { title: "Goodput", told: share === null ? "nothing ran" : `${formatShare(share)} of the time`, ...goodput },
        { title: "Stored bytes", told: told(bytes), ...bytes },
        { title: "Cost a month", told: told(cost), ...cost },
      ],
      // Those before the oldest sample are out of the picture.
      missed: samples.slice(0, -1).reduce((sum, each) => sum + each.missed_hours, 0),
    };
  }, [samples]);
  return (
    <>
      <div className={styles.plots}>
        {plots.map(({ title, told, series }) => (
          <div className="panel" key={title}>
            <p className={styles.told}>{told}</p>
            <Plot title={title} x={x} xLabel="Hour" time series={series} heightPx={HEIGHT_PX} syncKey={SYNC_KEY} />
          </div>
        ))}
      </div>
      {missed > 0 && (
        <p className="quiet">
          The service took no samples in {missed} {missed === 1 ? "hour" : "hours"} of this time: there the lines have
          gaps.
        </p>
      )}
    </>
  );
}
