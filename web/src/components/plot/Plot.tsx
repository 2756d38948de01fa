import { useEffect, useId, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { Time } from "../values";
import styles from "./Plot.module.css";

export interface PlotSeries {
  label: string;
  /** One value for each x; null: a gap; undefined: none here, and the line goes on. */
  values: (number | null | undefined)[];
  /** How a value is written, in the legend and in the table. */
  format?: (value: number) => string;
  /** A CSS colour; without one the accent. */
  color?: string;
  /** Its values alone, without a line between them. */
  dots?: boolean;
}

/** What makes another plot of it, and not only other values. */
type Look = Pick<PlotSeries, "label" | "color" | "dots">;

interface PlotProps {
  /** What the plot shows: its name for screen readers and the table's caption. */
  title: string;
  /** Ascending: steps, or seconds since 1970 with `time`. */
  x: number[];
  xLabel: string;
  time?: boolean;
  /** The first and the last x of the axis; without it those of the values. */
  xRange?: readonly [number, number];
  series: PlotSeries[];
  heightPx?: number;
  /** Plots with the same key share the cursor. */
  syncKey?: string;
  /** uPlot's own hooks, to draw into the plot. Kept between renderings. */
  hooks?: uPlot.Hooks.Arrays;
}

/** The table has so many rows at most: evenly chosen ones, and the last. */
const TABLE_ROWS = 200;

/** Lines over steps or time, and the same numbers as a table for those who do not see the lines. */
export function Plot({ title, x, xLabel, time = false, xRange, series, heightPx = 220, syncKey, hooks }: PlotProps) {
  const place = useRef<HTMLDivElement>(null);
  const id = useId();
  const [xFirst, xLast] = xRange ?? [];
  const plot = useRef<uPlot>(null);
  const shown = useRef({ x, series, xFirst, xLast });
  const looks = JSON.stringify(series.map(({ label, color, dots }) => ({ label, color, dots })));
  const hasRange = xRange !== undefined;

  // A poll brings values and steps. They go into the plot that is there: its cursor stays, and a selection under way too.
  useEffect(() => {
    shown.current = { x, series, xFirst, xLast };
    plot.current?.setData([x, ...series.map((each) => each.values)]);
  }, [x, series, xFirst, xLast]);

  useEffect(() => {
    const parent = place.current;
    if (parent === null) return;

    function draw() {
      if (parent === null) return;
      plot.current?.destroy();
      const colors = getComputedStyle(parent);
      const [text, line, accent] = ["--quiet", "--line", "--accent"].map((name) => colors.getPropertyValue(name));
      const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
      const { x, series } = shown.current;
      const format = (at: number, value: number) => (shown.current.series[at]?.format ?? String)(value);
      const range = (): uPlot.Range.MinMax => [shown.current.xFirst ?? null, shown.current.xLast ?? null];
      plot.current = new uPlot(
        {
          width: parent.clientWidth,
          height: heightPx,
          scales: { x: { time, ...(hasRange ? { range } : {}) } },
          axes: [
            { ...axis, label: time ? undefined : xLabel },
            {
              ...axis,
              size: 70,
              ...(series[0]?.format ? { values: (_, all) => all.map((each) => format(0, each)) } : {}),
            },
          ],
          series: [
            { label: xLabel },
            ...(JSON.parse(looks) as Look[]).map(({ label, color, dots }, at) => ({
              label,
              stroke: color ?? accent,
              width: 1.5,
              ...(dots ? { paths: () => null, points: { show: true, size: 7, fill: color ?? accent } } : {}),
              value: (_: uPlot, value: number | null) => (value == null ? "–" : format(at, value)),
            })),
          ],
          ...(syncKey === undefined ? {} : { cursor: { sync: { key: syncKey } } }),
          ...(hooks === undefined ? {} : { hooks }),
        },
        [x, ...series.map((each) => each.values)],
        parent,
      );
    }

    draw();
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: parent.clientWidth, height: heightPx }));
    resized.observe(parent);
    // The colours are the theme's, and a canvas does not follow by itself.
    const themed = new MutationObserver(draw);
    themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => {
      resized.disconnect();
      themed.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [xLabel, time, hasRange, looks, heightPx, syncKey, hooks]);

  const step = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
  const inTable = x.flatMap((_, index) => (index % step === 0 || index === x.length - 1 ? [index] : []));
  return (
    <figure className={styles.figure} aria-labelledby={`${id}-title`}>
      <figcaption id={`${id}-title`}>{title}</figcaption>
      <div ref={place} aria-hidden="true" />
      <details>
        <summary>{title} as a table</summary>
        <div className={styles.table}>
          <table>
            <caption className="visually-hidden">{title}</caption>
            <thead>
              <tr>
                <th scope="col">{xLabel}</th>
                {series.map(({ label }) => (
                  <th scope="col" key={label}>
                    {label}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {inTable.map((index) => (
                <tr key={index}>
                  <th scope="row">{time ? <Time at={new Date((x[index] ?? 0) * 1000).toISOString()} /> : x[index]}</th>
                  {series.map(({ label, values, format = String }) => {
                    const value = values[index];
                    return <td key={label}>{value == null ? "–" : format(value)}</td>;
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </figure>
  );
}
