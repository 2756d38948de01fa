/** A field that an audit event names. `before` or `after` is undefined where that side does not name it. */
export interface Change {
  field: string;
  before: unknown;
  after: unknown;
  differs: boolean;
}

type Fields = Record<string, unknown> | null;

/** The fields of both sides, those that differ first; each once, in the order that the service gave. */
export function changesOf(before: Fields, after: Fields): Change[] {
  const names = new Set([...Object.keys(before ?? {}), ...Object.keys(after ?? {})]);
  const all = [...names].map((field) => {
    const [old, now] = [before?.[field], after?.[field]];
    return { field, before: old, after: now, differs: JSON.stringify(old) !== JSON.stringify(now) };
  });
  return [...all.filter((each) => each.differs), ...all.filter((each) => !each.differs)];
}

/** A value of JSON on one line. undefined: the side does not name the field. */
export function formatValue(value: unknown): string {
  if (value === undefined) return "–";
  if (value === null) return "none";
  if (typeof value === "string") return value;
  if (typeof value === "number") return value.toLocaleString();
  if (Array.isArray(value) && value.every((each) => typeof each !== "object")) return value.join(", ") || "none";
  return JSON.stringify(value);
}

/** The first changes in one line: "quota bytes: none → 5,000". */
export function summaryOf(before: Fields, after: Fields): string {
  return changesOf(before, after)
    .filter((each) => each.differs)
    .map(({ field, before: old, after: now }) => {
      const name = field.replaceAll("_", " ");
      if (old === undefined) return `${name}: ${formatValue(now)}`;
      if (now === undefined) return `${name}: was ${formatValue(old)}`;
      return `${name}: ${formatValue(old)} → ${formatValue(now)}`;
    })
    .join("; ");
}

const UNITS: Record<string, number> = { "": 1, b: 1 };
for (const [power, letter] of ["k", "m", "g", "t", "p"].entries()) {
  UNITS[`${letter}b`] = 1000 ** (power + 1);
  UNITS[`${letter}ib`] = 1024 ** (power + 1);
}

/** "1.5 TiB" -> bytes; null for "" and "none": no limit; undefined: it is no number of bytes. */
export function parseBytes(text: string): number | null | undefined {
  const given = text.trim().toLowerCase();
  if (given === "" || given === "none") return null;
  const [, number, unit] = /^(\d+(?:\.\d+)?)\s*([a-z]*)$/.exec(given) ?? [];
  const factor = UNITS[unit ?? "?"];
  if (number === undefined || factor === undefined) return undefined;
  const bytes = Math.round(Number(number) * factor);
  return Number.isSafeInteger(bytes) ? bytes : undefined;
}

const SHOWN = ["PiB", "PB", "TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"];

/** For an input: `parseBytes` gives the same bytes back, with no rounding. */
export function exactBytes(bytes: number): string {
  for (const unit of SHOWN) {
    const factor = UNITS[unit.toLowerCase()] ?? 1;
    const value = Number((bytes / factor).toFixed(3));
    if (value >= 1 && value < 10_000 && value * factor === bytes) return `${value} ${unit}`;
  }
  return String(bytes);
}
