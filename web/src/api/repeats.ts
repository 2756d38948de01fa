import { useRef } from "react";

/** For the header Idempotency-Key: any text that no other call has. Over plain HTTP a browser has no randomUUID. */
function newKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A call that makes something, with a key that stays the same until the service has taken it: when its reply was lost
 * and the user retries, nothing is made twice. Another body is another call, and so is the one after a success. */
export function useOnce<Body, Made>(call: (body: Body, key: string) => Promise<Made>): (body: Body) => Promise<Made> {
  const keys = useRef(new Map<string, string>());
  return async (body) => {
    const text = JSON.stringify(body);
    const key = keys.current.get(text) ?? newKey();
    keys.current.set(text, key);
    const made = await call(body, key);
    keys.current.delete(text);
    return made;
  };
}
