const PARTS: readonly (readonly [string, number])[] = [
  ["d", 86_400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
];

/** The two largest parts: 3720 -> "1 h 2 min". */
export function formatSeconds(seconds: number): string {
  let rest = Math.max(0, Math.round(seconds));
  const found: string[] = [];
  for (const [name, size] of PARTS) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count > 0) found.push(`${count} ${name}`);
    else if (found.length > 0) break;
    if (found.length === 2) break;
  }
  return found.join(" ") || "0 s";
}

/** In the reader's time zone. */
export function formatLocal(moment: string): string {
  return new Date(moment).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** 2026-01-02 03:04:05 UTC */
export function formatUtc(moment: string): string {
  return `${new Date(moment).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** As the service takes a moment, with its zone; a text without one is the reader's time, a day alone UTC. undefined: it
 * is none, or of a year that no field for dates has. */
export function readMoment(text: string): string | undefined {
  const at = new Date(text);
  const year = at.getUTCFullYear();
  return year >= 1970 && year <= 9999 ? at.toISOString() : undefined;
}

export function secondsSince(moment: string, now: number): number {
  return Math.max(0, (now - Date.parse(moment)) / 1000);
}
