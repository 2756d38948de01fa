import { exactBytes, exactCount, formatValue, parseBytes, parseCount, sameOf, summaryOf } from "./changes";

it("names what both sides have in common", () => {
  const same = sameOf({ kind: "drill", state: "running" }, { kind: "drill", state: "cancelled", error: null });
  expect(same).toEqual([{ path: "kind", before: "drill", after: "drill" }]);
  expect([sameOf(null, { kind: "drill" }), sameOf({ kind: "drill" }, null)]).toEqual([[], []]);
});

it("says a change in one line", () => {
  expect(summaryOf({ quota_bytes: null }, { quota_bytes: 5000 })).toBe("quota bytes: none → 5,000");
  expect(summaryOf({ host: "a.example" }, null)).toBe("host: was a.example");
  expect(summaryOf(null, { scopes: ["read", "train"] })).toBe("scopes: read, train");
  expect(summaryOf({ document: { keep_last: 2, rules: [1] } }, { document: { keep_last: 3, rules: [1] } })).toBe(
    "document.keep last: 2 → 3",
  );
  expect(summaryOf(null, null)).toBe("");
});

it("writes nested values as JSON", () => {
  expect(formatValue({ rules: [{ last: 3 }] })).toBe('{"rules":[{"last":3}]}');
  expect([formatValue([]), formatValue(undefined), formatValue(false)]).toEqual(["none", "–", "false"]);
});

it("reads bytes in decimal and binary units, and no limit", () => {
  expect(parseBytes("1.5 TiB")).toBe(1.5 * 1024 ** 4);
  expect(parseBytes("500GB")).toBe(500e9);
  expect(parseBytes(" 4096 ")).toBe(4096);
  expect([parseBytes(""), parseBytes("none")]).toEqual([null, null]);
  for (const wrong of ["much", "-1", "1 XB", "1e400", "99999999 PiB"]) expect(parseBytes(wrong)).toBeUndefined();
});

it("writes bytes so that an input gives the same back", () => {
  expect([exactBytes(1e9), exactBytes(1024 ** 4), exactBytes(1_000_001), exactBytes(0)]).toEqual([
    "1 GB",
    "1 TiB",
    "1000.001 kB",
    "0",
  ]);
  for (const bytes of [1, 953, 4_815_162_342, 3 * 1024 ** 5]) expect(parseBytes(exactBytes(bytes))).toBe(bytes);
});

it("reads counts with and without a letter, and writes them so that an input gives the same back", () => {
  expect([parseCount("20k"), parseCount("1.5 M"), parseCount(""), parseCount("none")]).toEqual([
    20e3,
    1.5e6,
    null,
    null,
  ]);
  for (const wrong of ["many", "-1", "5 GB", "1e400"]) expect(parseCount(wrong)).toBeUndefined();
  expect([0, 500, 20_000, 5_000_000, 1_234_567].map(exactCount)).toEqual(["0", "500", "20k", "5M", "1234567"]);
});
