import { type RunSearch, runRoute } from "./route";

const read = runRoute.options.validateSearch as (search: Record<string, unknown>) => RunSearch;

it.each([
  // The service wants a zone.
  ["2026-01-01", "2026-01-01T00:00:00.000Z"],
  ["2026-01-05T10:20:30+02:00", "2026-01-05T08:20:30.000Z"],
  // Of this one no day can be made.
  ["+275760-09-13T00:00:00Z", undefined],
])("reads the moment %s of the address", (since, found) => {
  expect(read({ since }).since).toBe(found);
  expect(read({ until: since }).until).toBe(found);
});
