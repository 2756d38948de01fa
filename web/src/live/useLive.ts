import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { sessionQuery } from "@/api/session";
import { follow, type Live } from "./follow";
import { Pace } from "./pace";

/** Follows the event stream of a project (undefined: of all that the session sees) and asks again for what an event
 * touches. `isKnown`: whether the project is known yet; before, it would be another stream. */
export function useLive(project: string | undefined, isKnown = true): Live {
  const queries = useQueryClient();
  const [live, setLive] = useState<Live>("connecting");

  useEffect(() => {
    if (!isKnown) return;
    const pace = new Pace(queries);
    const end = follow(project, {
      onState: setLive,
      onEvent: (event) => pace.take(event),
      onGap: () => void queries.invalidateQueries({}, { cancelRefetch: false }),
      onSignedOut: () => void queries.invalidateQueries({ queryKey: sessionQuery.queryKey }),
    });
    return () => {
      end();
      pace.stop();
    };
  }, [project, isKnown, queries]);

  return live;
}
