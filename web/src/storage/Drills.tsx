import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { ProblemError } from "@/api/problem";
import { CopyCommand } from "@/components/CopyCommand";
import { Figure, Figures } from "@/components/facts/Figures";
import { ErrorState } from "@/components/states";
import { formatSeconds } from "@/format/moments";
import { Operations, Start } from "./LongWork";

export function Drills({ project, run }: { project: string; run: string | undefined }) {
  // The list of stores is not for a project's token; their clocks are for every caller.
  const stores = useQuery("get", "/v1/store-clocks");
  const [chosen, setChosen] = useState<Schemas["StoreRole"]>("primary");
  const [selector, setSelector] = useState("");
  const wanted = selector.trim() || "latest";
  return (
    <>
      <Objectives project={project} run={run} />
      <label>
        From the store alone{" "}
        <select value={chosen} onChange={(event) => setChosen(event.target.value as Schemas["StoreRole"])}>
          {(stores.data?.items ?? []).map((each) => (
            <option key={each.role}>{each.role}</option>
          ))}
        </select>
      </label>{" "}
      <label>
        Which checkpoint{" "}
        <input
          value={selector}
          onChange={(event) => setSelector(event.target.value)}
          placeholder="latest, 1200, best:loss, ck_…"
        />
      </label>
      <Start
        name="Start a drill"
        of={run === undefined ? undefined : { run, store: chosen, selector: wanted }}
        title={`Restore ${wanted} of ${run} from the ${chosen} store`}
        text="Every byte is read from this store alone and checked, as a restore would. It takes as long as a restore does: that is the time to compare with your objective."
        start={({ run: name, ...body }, key) =>
          api.POST("/v1/projects/{project}/runs/{run}/drills", {
            params: { path: { project, run: name }, header: { "idempotency-key": key } },
            body,
          })
        }
      />
      <Operations project={project} kind="drill" empty="No drill was made yet" />
    </>
  );
}

/** Of the policy of objectives. */
interface ObjectivesDocument {
  rpo_seconds?: number;
  rto_seconds?: number;
}

/** What the project, or the chosen run, can bear. */
function Objectives({ project, run }: { project: string; run: string | undefined }) {
  const kind = "objectives" as const;
  const ofProject = useQuery(
    "get",
    "/v1/projects/{project}/policies/{kind}",
    { params: { path: { project, kind } } },
    { enabled: run === undefined },
  );
  const ofRun = useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/policies/{kind}",
    { params: { path: { project, run: run ?? "", kind } } },
    { enabled: run !== undefined },
  );
  const found = run === undefined ? ofProject : ofRun;
  const error: unknown = found.error;
  if (error instanceof ProblemError && error.problem.code === "policy_not_found")
    return (
      <div className="quiet">
        There is no objective to compare with.{" "}
        <Link to="/retention" search={{ kind: "objectives", ...(run !== undefined && { run }) }}>
          Set objectives
        </Link>
        , or write <code>{'{"rpo_seconds": 3600, "rto_seconds": 900}'}</code> to a file, and put it as a policy:
        <CopyCommand
          command={`holdfast policies put objectives ${run === undefined ? project : `${project}/${run}`} --file objectives.json`}
          label="the command that sets objectives"
        />
      </div>
    );
  if (error) return <ErrorState error={error} onRetry={() => void found.refetch()} />;
  const { rpo_seconds, rto_seconds } = (found.data?.document ?? {}) as ObjectivesDocument;
  return (
    <Figures>
      <Figure name="May be behind by (RPO)">{rpo_seconds == null ? "no objective" : formatSeconds(rpo_seconds)}</Figure>
      <Figure name="Restored within (RTO)">{rto_seconds == null ? "no objective" : formatSeconds(rto_seconds)}</Figure>
    </Figures>
  );
}
