import { type Change, changesOf } from "@/format/changes";

type Fields = Record<string, unknown> | null;

/** The fields that both sides name with the same value: they tell what the change was made to. */
export function sameOf(before: Fields, after: Fields): Change[] {
  return Object.entries(before ?? {})
    .filter(([path, value]) => JSON.stringify(value) === JSON.stringify(after?.[path]))
    .map(([path, value]) => ({ path, before: value, after: value }));
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
  return changesOf(before ?? {}, after ?? {}, { lists: true })
    .map(({ path, before: old, after: now }) => {
      const name = path.replaceAll("_", " ");
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

const COUNTS: Record<string, number> = { "": 1, k: 1e3, m: 1e6, g: 1e9 };

/** "1.5 TiB" -> bytes; null for "" and "none": no limit; undefined: it is no number of bytes. */
export function parseBytes(text: string): number | null | undefined {
  return parse(text, UNITS);
}

/** "20k" -> 20000; null and undefined as of `parseBytes`. */
export function parseCount(text: string): number | null | undefined {
  return parse(text, COUNTS);
}

function parse(text: string, units: Record<string, number>): number | null | undefined {
  const given = text.trim().toLowerCase();
  if (given === "" || given === "none") return null;
  const [, number, unit] = /^(\d+(?:\.\d+)?)\s*([a-z]*)$/.exec(given) ?? [];
  const factor = units[unit ?? "?"];
  if (number === undefined || factor === undefined) return undefined;
  const count = Math.round(Number(number) * factor);
  return Number.isSafeInteger(count) ? count : undefined;
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

/** For an input: `parseCount` gives the same count back. */
export function exactCount(count: number): string {
  if (count > 0 && count % 1e6 === 0) return `${count / 1e6}M`;
  return count > 0 && count % 1e3 === 0 ? `${count / 1e3}k` : String(count);
}
