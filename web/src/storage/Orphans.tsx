import { useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { useOnce } from "@/api/repeats";
import { Allowed, useRefusal } from "@/app/Allowed";
import { Can } from "@/components/Can";
import { Figure, Figures } from "@/components/facts/Figures";
import { ErrorState, Reply } from "@/components/states";
import { Age } from "@/components/values";
import { formatBytes, formatCount } from "@/format/numbers";
import { plural } from "@/format/words";
import { refresh } from "@/live/refresh";
import { Operations } from "./LongWork";

const SWEEPS = "/v1/sweeps";

export function Orphans() {
  const refusal = useRefusal("operate", true);
  const [error, setError] = useState<unknown>(null);
  const [said, setSaid] = useState("");
  const start = useOnce((body: Schemas["StartSweep"], key) =>
    api.POST(SWEEPS, { params: { header: { "idempotency-key": key } }, body }),
  );

  async function sweep() {
    setError(null);
    setSaid("");
    try {
      await start({ dry_run: true, force: false });
      setSaid("The sweep deletes nothing. The table has its figures when it is done.");
      void refresh("/v1/operations");
    } catch (failure) {
      setError(failure);
    }
  }

  return (
    <>
      <Allowed scope="read" everyProject what="Orphans">
        <Sweeps />
      </Allowed>
      <Collection />
      <Can scope="operate" reason={refusal}>
        <button type="button" onClick={() => void sweep()}>
          Look for orphans
        </button>
      </Can>
      {said !== "" && <p role="status">{said}</p>}
      {error !== null && <ErrorState error={error} />}
    </>
  );
}

/** What the last sweep of each store found, and the sweeps that were started. */
function Sweeps() {
  const sweeps = useQuery("get", SWEEPS);
  return (
    <>
      <Reply of={sweeps} what="the sweeps">
        {({ stores, problems }) => (
          <>
            {(problems ?? []).map((each) => (
              <p key={each} role="alert">
                {each}
              </p>
            ))}
            {stores.map((each) => (
              <Figures key={each.store}>
                <Figure name={`Swept (${each.store}), ago`}>
                  <Age since={each.swept_at} />
                </Figure>
                <Figure name="Orphans due">
                  {formatCount(each.due_orphans)}, {formatBytes(each.due_bytes)}
                </Figure>
                <Figure name="Deleted">
                  {formatCount(each.deleted)}, {formatBytes(each.deleted_bytes)}
                </Figure>
                {each.stopped !== null && <Figure name="Stopped">{each.stopped}</Figure>}
              </Figures>
            ))}
          </>
        )}
      </Reply>
      <Operations kind="sweep" empty="No sweep was started by a person" changes={SWEEPS} />
    </>
  );
}

/** What the collector would delete. A project's token is told of its project. */
function Collection() {
  const plan = useQuery("get", "/v1/collections/plan");
  return (
    <Reply of={plan} what="the collection">
      {({ stores }) => (
        <ul>
          {stores.map((each) => (
            <li key={each.store}>
              {each.store}: {plural(each.copies, "copy", "copies")} ({formatBytes(each.bytes)}) would be deleted now
              {each.problem !== null && `; not yet: ${each.problem}`}
              {each.waiting.map((wait) => `; ${formatBytes(wait.bytes)} wait for a ${wait.waits_for}`).join("")}
            </li>
          ))}
        </ul>
      )}
    </Reply>
  );
}
