/** A value that two attempts do not share. `undefined`: that one has none. */
export interface Difference {
  path: string;
  before?: unknown;
  after?: unknown;
  /** added, removed or changed. */
  change?: string;
}

/** By name. */
export function environmentDifferences(before: Record<string, string>, after: Record<string, string>): Difference[] {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].sort();
  return names
    .filter((name) => before[name] !== after[name])
    .map((path) => ({ path, before: before[path], after: after[path] }));
}

/** As it stands in a table: a text without quotes, anything else as JSON. */
export function asText(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}
