import type { Schemas } from "@/api/client";

type ProjectSample = Schemas["ProjectSample"];

export const HOUR_SECONDS = 3600;

/** The hours as a plot wants them, the oldest first. `x`: the begin of each, in seconds since 1970. */
export interface Hours {
  x: number[];
  samples: (ProjectSample | null)[];
}

/** Of the list, the newest first. Between two samples that are not neighbours stands one without: there the line has a
 * gap, for what was then is not known. */
export function hoursOf(newestFirst: readonly ProjectSample[]): Hours {
  const hours: Hours = { x: [], samples: [] };
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
export function goodputOf(samples: readonly ProjectSample[]): number | null {
  const wall = samples.reduce((sum, each) => sum + each.wall_seconds, 0);
  return wall > 0 ? samples.reduce((sum, each) => sum + each.productive_seconds, 0) / wall : null;
}

/** "+1.5 GiB", "-20.0 %" …: from the first value to the last; null: it is the same, or there is one alone. */
export function changeOf(values: readonly number[], format: (value: number) => string): string | null {
  const [first, last] = [values[0], values.at(-1)];
  if (first === undefined || last === undefined || first === last) return null;
  return `${last > first ? "+" : "-"}${format(Math.abs(last - first))}`;
}
