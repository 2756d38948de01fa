/** A value that two sides do not share. undefined: that side has none. */
export interface Change {
  /** The way to it: `optimizer.betas[0]`. */
  path: string;
  before: unknown;
  after: unknown;
}

type Leaves = Map<string, unknown>;

/** Value by value, what differs, by path, as the service compares the configurations of one run. `lists`: a list is one
 * value, and is not compared item by item. */
export function changesOf(before: unknown, after: unknown, { lists = false } = {}): Change[] {
  const then = leaves(before, lists);
  const now = leaves(after, lists);
  return [...new Set([...then.keys(), ...now.keys()])]
    .sort()
    .map((path) => ({ path, before: then.get(path), after: now.get(path) }))
    .filter((each) => JSON.stringify(each.before) !== JSON.stringify(each.after));
}

function leaves(value: unknown, lists: boolean, path = "", found: Leaves = new Map()): Leaves {
  if (Array.isArray(value) && value.length > 0 && !lists) {
    value.forEach((item, index) => {
      leaves(item, lists, `${path}[${index}]`, found);
    });
  } else if (isMap(value) && Object.keys(value).length > 0) {
    for (const [key, item] of Object.entries(value)) leaves(item, lists, path === "" ? key : `${path}.${key}`, found);
  } else if (path !== "" && value !== undefined) found.set(path, value);
  return found;
}

/** A metric of the API is a map, and yet one value. */
function isMap(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value) && !("nonfinite" in value);
}

/** The words of a field that is typed, with spaces or commas between them: each once. */
function wordsOf(text: string): string[] {
  return [...new Set(text.split(/[\s,]+/).filter(Boolean))];
}

/** The words that are there now, with what a person added to those that were there when the field was opened, and without
 * what that person took away: what another person has changed meanwhile stays. */
export function editedWords(opened: readonly string[], typed: string, now: readonly string[]): string[] {
  const wanted = wordsOf(typed);
  const kept = now.filter((word) => wanted.includes(word) || !opened.includes(word));
  return [...new Set([...kept, ...wanted.filter((word) => !opened.includes(word))])];
}

/** As it stands in a configuration: a text without quotes, anything else as JSON. */
export function asText(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** A value for people: nothing, a metric by its number, a list with commas. */
export function inWords(value: unknown): string {
  if (value === undefined || value === null) return "nothing";
  if (Array.isArray(value)) return value.length === 0 ? "nothing" : value.map(inWords).join(", ");
  if (typeof value === "object" && "nonfinite" in value) {
    const metric = value as { value?: unknown; nonfinite?: unknown };
    return inWords(metric.nonfinite ?? metric.value);
  }
  return asText(value);
}
