import { useRef } from "react";
import { newKey } from "@/format/keys";

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
