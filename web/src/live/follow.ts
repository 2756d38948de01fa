import type { Schemas } from "@/api/client";
import { isGone, isSignedOut, problemOf } from "@/api/problem";
import { messagesOf } from "./stream";

export type Live = "connecting" | "on" | "off";

interface Follower {
  onState: (state: Live) => void;
  onEvent: (event: Schemas["EventView"]) => void;
  /** Events may have been missed: everything may have changed. Called when the stream goes on. */
  onGap: () => void;
  onSignedOut: () => void;
}

const SHORTEST_WAIT_MS = 2000;
const LONGEST_WAIT_MS = 60_000;
/** The service sends something every 15 s: without it the connection is dead, for example after the machine slept. */
const QUIET_MS = 60_000;
/** After so long out of sight one call for each reply in sight is less than all the events. */
const CATCH_UP_MS = 300_000;

/** Follows the events of a project (undefined: of all that the session sees) while the tab is in sight: a browser has six
 * connections to a service over HTTP/1.1, for all its tabs together. After an interruption it goes on from the last
 * event. The service is asked again as it says (Retry-After), and otherwise less and less often. Returns what ends it. */
export function follow(project: string | undefined, { onState, onEvent, onGap, onSignedOut }: Follower): () => void {
  const ended = new AbortController();
  const address = `/v1/events/stream${project === undefined ? "" : `?${new URLSearchParams({ project })}`}`;
  let position: string | null = null;
  let hasGap = false;
  let failures = 0;

  /** One connection, until it ends. Returns after how long the next one is tried, in ms. */
  async function read(connection: AbortController): Promise<number> {
    const headers: HeadersInit = position === null ? {} : { "Last-Event-ID": position };
    const reply = await fetch(address, { headers, signal: connection.signal, cache: "no-store" });
    if (!reply.ok || reply.body === null) {
      const problem = await problemOf(reply);
      if (isSignedOut(problem)) {
        onSignedOut();
        return Math.max(waitMs(), LONGEST_WAIT_MS);
      }
      if (isGone(problem)) position = null; // these events are forgotten
      hasGap = hasGap || position === null;
      const asked = Number(reply.headers.get("Retry-After")) * 1000;
      return Math.max(waitMs(), Number.isFinite(asked) ? asked : 0);
    }
    failures = 0;
    let isLive = false;
    const isQuiet = () => connection.abort();
    let quiet = window.setTimeout(isQuiet, QUIET_MS);
    try {
      for await (const { id, data } of messagesOf(reply.body)) {
        window.clearTimeout(quiet);
        quiet = window.setTimeout(isQuiet, QUIET_MS);
        position = id;
        // From here on no event is missed: the service says at once where the stream begins.
        if (!isLive) onState("on");
        if (hasGap) onGap();
        [isLive, hasGap] = [true, false];
        if (data !== "") onEvent(JSON.parse(data) as Schemas["EventView"]);
      }
    } finally {
      window.clearTimeout(quiet);
    }
    return SHORTEST_WAIT_MS;
  }

  function waitMs(): number {
    failures += 1;
    const most = Math.min(LONGEST_WAIT_MS, SHORTEST_WAIT_MS * 2 ** (failures - 1));
    return most * (0.75 + Math.random() / 4); // many pages do not come back at once
  }

  async function run(): Promise<void> {
    while (!ended.signal.aborted) {
      if (document.visibilityState !== "visible") {
        const since = Date.now();
        await changed(ended.signal);
        if (Date.now() - since > CATCH_UP_MS) position = null;
        hasGap = hasGap || position === null;
        continue;
      }
      const connection = new AbortController();
      const close = () => connection.abort();
      const hide = () => document.visibilityState !== "visible" && close();
      document.addEventListener("visibilitychange", hide);
      ended.signal.addEventListener("abort", close);
      onState("connecting");
      let wait: number;
      try {
        wait = await read(connection);
      } catch {
        hasGap = hasGap || position === null;
        wait = connection.signal.aborted ? 0 : waitMs();
      } finally {
        document.removeEventListener("visibilitychange", hide);
        ended.signal.removeEventListener("abort", close);
      }
      if (failures > 0) onState("off");
      if (wait > 0) await pause(wait, ended.signal);
    }
  }

  void run();
  return () => ended.abort();
}

/** Until the tab comes into sight or goes out of it, or the end. */
function changed(ended: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      document.removeEventListener("visibilitychange", done);
      ended.removeEventListener("abort", done);
      resolve();
    };
    document.addEventListener("visibilitychange", done);
    ended.addEventListener("abort", done);
  });
}

function pause(milliseconds: number, ended: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = () => {
      window.clearTimeout(timer);
      ended.removeEventListener("abort", done);
      resolve();
    };
    const timer = window.setTimeout(done, milliseconds);
    ended.addEventListener("abort", done);
  });
}
