import { useSyncExternalStore } from "react";

const TICK_MS = 5000;
const listeners = new Set<() => void>();
let timer: ReturnType<typeof setInterval> | undefined;
let now = Date.now();

function listen(listener: () => void): () => void {
  listeners.add(listener);
  timer ??= setInterval(() => {
    now = Date.now();
    for (const each of listeners) each();
  }, TICK_MS);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0) {
      clearInterval(timer);
      timer = undefined;
    }
  };
}

function read(): number {
  // Without a timer nobody has looked for a while. Two reads of one rendering must agree.
  if (timer === undefined && Date.now() - now > TICK_MS) now = Date.now();
  return now;
}

/** Milliseconds since 1970, every few seconds anew, by one timer for the whole page. */
export function useNow(): number {
  return useSyncExternalStore(listen, read);
}
