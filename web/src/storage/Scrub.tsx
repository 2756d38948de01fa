import { api, useQuery } from "@/api/client";
import { Allowed } from "@/app/Allowed";
import { Figure, Figures } from "@/components/facts/Figures";
import { EmptyState, Reply } from "@/components/states";
import { Age, Nothing } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatCount } from "@/format/numbers";
import { OTHERWISE_MS } from "@/live/refresh";
import { Operations, Start } from "./LongWork";

function OfService() {
  const controllers = useQuery(
    "get",
    "/v1/controllers",
    { params: { query: { limit: 100 } } },
    { refetchInterval: OTHERWISE_MS },
  );
  return (
    <Reply of={controllers} what="the scrub">
      {({ items }) => {
        const scrub = items.find((each) => each.name === "scrub");
        if (scrub === undefined) return <EmptyState title="This service does not scrub" />;
        return (
          <Figures>
            <Figure name="Copies due to be read again">
              {scrub.due === null ? <Nothing why="unknown" /> : formatCount(scrub.due)}
            </Figure>
            <Figure name="The oldest is late by">
              {scrub.lag_seconds === null ? <Nothing why="unknown" /> : formatSeconds(scrub.lag_seconds)}
            </Figure>
            <Figure name="Last pass, ago">
              <Age since={scrub.last_pass_at} />
            </Figure>
            {scrub.paused_at !== null && <Figure name="Paused">{scrub.pause_reason ?? "yes"}</Figure>}
            {scrub.error !== null && <Figure name="Last error">{scrub.error}</Figure>}
          </Figures>
        );
      }}
    </Reply>
  );
}

export function Scrub({ project, run }: { project: string | undefined; run: string | undefined }) {
  return (
    <>
      <Allowed scope="read" everyProject what="The scrub of the service">
        <OfService />
      </Allowed>
      {project !== undefined && (
        <>
          <Start
            name="Scrub the run"
            of={run === undefined ? undefined : { run }}
            title={`Read every copy of ${run}`}
            text="Each stored byte of the run’s checkpoints is read again and compared with its digest. What is bad is repaired from another copy, if there is one."
            start={(of, key) =>
              api.POST("/v1/projects/{project}/runs/{run}/scrubs", {
                params: { path: { project, ...of }, header: { "idempotency-key": key } },
                body: { mode: "read" },
              })
            }
          />
          <Operations
            project={project}
            kind="scrub"
            empty="No scrub was started by a person"
            changes="/v1/projects/{project}/bad-copies"
          />
        </>
      )}
    </>
  );
}
