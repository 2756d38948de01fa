import { secondsToQuota } from "./share_of_quota";

it("tells when the quota is reached at the present growth", () => {
  expect(secondsToQuota(40, 100, 2)).toBe(30);
  expect(secondsToQuota(120, 100, 2)).toBe(0);
  expect(secondsToQuota(120, 100, 0)).toBe(0);
});

it("tells nothing where nothing grows, or where there is no quota", () => {
  expect(secondsToQuota(40, 100, 0)).toBeNull();
  expect(secondsToQuota(40, null, 2)).toBeNull();
});
