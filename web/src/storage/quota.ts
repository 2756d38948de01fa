/** When a project reaches its quota if its runs go on saving as they do and nothing expires: the earliest that it can
 * be. `null`: never, or there is no quota. Bytes, bytes a second -> seconds. */
export function secondsToQuota(stored: number, quota: number | null, growth: number): number | null {
  if (quota === null || growth <= 0) return quota !== null && stored >= quota ? 0 : null;
  return Math.max(0, (quota - stored) / growth);
}
