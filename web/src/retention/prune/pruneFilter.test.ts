import { fieldsOfFilter, filterInWords, filterOf } from "./pruneFilter";

const FILTER = {
  from_step: 0,
  before_step: 5000,
  attempt: 2,
  older_than_seconds: 604_800,
  labels: ["debug", "spike"],
  health: ["diverged" as const],
};

it("gives back the filter that the fields were filled from", () => {
  expect(filterOf(fieldsOfFilter(FILTER))).toEqual(FILTER);
  expect(filterOf(fieldsOfFilter({}))).toEqual({});
});

it("refuses a field that it cannot read, for a condition that is left out matches more", () => {
  const empty = fieldsOfFilter({});
  expect(filterOf({ ...empty, beforeStep: "5k" })).toBe("Before step must be a whole number.");
  expect(filterOf({ ...empty, olderThan: "7" })).toMatch(/^Older than must be/);
});

it("reads ages in seconds to weeks, and gives each back as it is", () => {
  const empty = fieldsOfFilter({});
  expect(filterOf({ ...empty, olderThan: "12h" })).toEqual({ older_than_seconds: 43_200 });
  expect(fieldsOfFilter({ older_than_seconds: 3 * 86_400 }).olderThan).toBe("3d");
  // Of a link that was written by hand.
  expect(filterInWords({ older_than_seconds: 5400 })).toBe("committed longer ago than 90min");
  expect(filterOf(fieldsOfFilter({ older_than_seconds: 5400 }))).toEqual({ older_than_seconds: 5400 });
});

it("says in words why a checkpoint matches", () => {
  expect(filterInWords(FILTER)).toBe(
    "from step 0; before step 5,000; attempt 2; committed longer ago than 1w; label debug or spike; diverged",
  );
  expect(filterInWords({})).toBe("no condition was given");
});
