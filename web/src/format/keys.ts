/** For the header Idempotency-Key: any text that no other call has. Kept with what it makes, for example by
 * `useState(newKey)` in a dialog, it makes one thing, however often the reader tries. Over plain HTTP a browser has no
 * randomUUID. */
export function newKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
