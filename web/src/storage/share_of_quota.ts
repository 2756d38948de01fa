/** From this share on a project needs attention, as the alert HoldfastQuotaNear has it. */
export const QUOTA_NEAR = 0.9;

/** Of what counts against a quota. With a quota of nothing all of it is used. */
export function quotaShare(used: number, quota: number): number {
  return quota === 0 ? 1 : used / quota;
}

/** When a project reaches its quota if its runs go on saving as they do and nothing expires: the earliest that it can
 * be. `null`: never, or there is no quota. Bytes, bytes a second -> seconds. */
export function secondsToQuota(used: number, quota: number | null, growth: number): number | null {
  if (quota === null || growth <= 0) return quota !== null && used >= quota ? 0 : null;
  return Math.max(0, (quota - used) / growth);
}
