import type { PlotSeries } from "./Plot";

export const HOUR_SECONDS = 3600;

/** The hours as a plot wants them, the oldest first. `x`: the begin of each, in seconds since 1970. */
export interface Hours<Sample> {
  x: number[];
  samples: (Sample | null)[];
}

/** Of the list, the newest first. Between two samples that are not neighbours stands one without: there the line has a
 * gap, for what was then is not known. */
export function hoursOf<Sample extends { since: string }>(newestFirst: readonly Sample[]): Hours<Sample> {
  const hours: Hours<Sample> = { x: [], samples: [] };
  for (const sample of newestFirst.toReversed()) {
    const begin = Date.parse(sample.since) / 1000;
    const before = hours.x.at(-1);
    if (before !== undefined && begin - before > HOUR_SECONDS) {
      hours.x.push(before + HOUR_SECONDS);
      hours.samples.push(null);
    }
    hours.x.push(begin);
    hours.samples.push(sample);
  }
  return hours;
}

/** The goodput of all samples together; null: nothing ran. The average of shares would count a minute as an hour. */
export function goodputOf(samples: readonly { wall_seconds: number; productive_seconds: number }[]): number | null {
  const wall = samples.reduce((sum, each) => sum + each.wall_seconds, 0);
  return wall > 0 ? samples.reduce((sum, each) => sum + each.productive_seconds, 0) / wall : null;
}

/** Between the samples, which are the newest first: hours before the oldest one are out of the picture. */
export function missedHours(newestFirst: readonly { missed_hours: number }[]): number {
  return newestFirst.slice(0, -1).reduce((sum, each) => sum + each.missed_hours, 0);
}

/** "+1.5 GiB", "-20.0 %" …: from the first value to the last; null: it is the same, or there is one alone. */
export function changeOf(values: readonly number[], format: (value: number) => string): string | null {
  const [first, last] = [values[0], values.at(-1)];
  if (first === undefined || last === undefined || first === last) return null;
  return `${last > first ? "+" : "-"}${format(Math.abs(last - first))}`;
}

/** One value hour by hour. */
export interface Trend {
  title: string;
  /** What it comes to, in words. */
  told: string;
  series: PlotSeries[];
}

interface TrendOf {
  title: string;
  label: string;
  /** null: it is not known. */
  values: (number | null)[];
  format: (value: number) => string;
  /** Without it the last value, and the change since the first. */
  told?: string;
}

export function trendOf({ title, label, values, format, told }: TrendOf): Trend {
  const known = values.filter((value) => value !== null);
  const change = `${format(known.at(-1) ?? 0)}, ${changeOf(known, format) ?? "no change"}`;
  return { title, told: told ?? change, series: [{ label, values, format }] };
}
