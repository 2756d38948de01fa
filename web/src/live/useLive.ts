import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import type { Schemas } from "@/api/client";
import { EVENT_TYPES, touches } from "./touches";

export type Live = "connecting" | "on" | "off";
type EventView = Schemas["EventView"];

/** Changes come in bursts, when many ranks commit: what they touch is asked for once. */
const GATHERED_FOR_MS = 1000;
/** A browser gives up for good after a reply that is no stream (the session has ended, too many streams). */
const TRIES_AGAIN_AFTER_MS = 15_000;

/** Follows the event stream of a project (undefined: of all that the session sees) and asks again for what an event
 * touches. The browser itself comes again after an interruption, and misses no event: it sends Last-Event-ID. */
export function useLive(project: string | undefined): Live {
  const queries = useQueryClient();
  const [live, setLive] = useState<Live>("connecting");

  useEffect(() => {
    let stream: EventSource | undefined;
    let later: number | undefined;
    let gathering: number | undefined;
    let gathered: EventView[] = [];

    function invalidate() {
      const events = gathered;
      gathered = [];
      gathering = undefined;
      void queries.invalidateQueries({
        predicate: (query) => events.some((event) => touches(event.type, event.data, query.queryKey)),
      });
    }

    function take(message: MessageEvent<string>) {
      gathered.push(JSON.parse(message.data) as EventView);
      gathering ??= window.setTimeout(invalidate, GATHERED_FOR_MS);
    }

    function open() {
      stream = new EventSource(
        `/v1/events/stream${project === undefined ? "" : `?${new URLSearchParams({ project })}`}`,
      );
      stream.onopen = () => setLive("on");
      stream.onerror = () => {
        if (stream?.readyState === EventSource.CLOSED) {
          setLive("off");
          later = window.setTimeout(() => {
            // Without an id to go on from: everything may have changed.
            void queries.invalidateQueries();
            open();
          }, TRIES_AGAIN_AFTER_MS);
        } else setLive("connecting");
      };
      for (const type of EVENT_TYPES) stream.addEventListener(type, take);
    }

    open();
    return () => {
      stream?.close();
      window.clearTimeout(later);
      window.clearTimeout(gathering);
    };
  }, [project, queries]);

  return live;
}
