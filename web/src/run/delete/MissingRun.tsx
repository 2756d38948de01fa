import { Link } from "@tanstack/react-router";
import { useState } from "react";
import type { Schemas } from "@/api/client";
import { useWhole } from "@/api/whole";
import { Can } from "@/components/Can";
import { ErrorState, Loading } from "@/components/states";
import { Time } from "@/components/values";
import { takeRunBack } from "@/retention/actions";

interface MissingRunProps {
  project: string;
  run: string;
  /** Of a run that was deleted on this screen. null: whether it is in the trash is not known yet. */
  inTrash: Schemas["InTrash"] | null;
  /** Why there is no run to show. */
  error: unknown;
  onBack: (taken: Schemas["TakenBack"]) => Promise<unknown>;
}

/** In place of a run that is in no list: it is in the trash and can be taken back, or nothing has this name. */
export function MissingRun({ project, run, inTrash, error, onBack }: MissingRunProps) {
  const isIt = ({ name }: Schemas["RunView"]) => name === run;
  const trash = useWhole(
    "/v1/projects/{project}/runs",
    { path: { project }, query: { deleted: true, limit: 500 } },
    { enabled: inTrash === null, isEnough: (items) => items.some(isIt) },
  );
  const found = inTrash ?? trash.items.find(isIt)?.in_trash;
  if (found == null) {
    return (
      <>
        {trash.isReading ? <Loading what="the deleted runs" /> : <ErrorState error={error} />}
        {trash.error ? <ErrorState error={trash.error} onRetry={trash.retry} /> : null}
        <p>
          Choose another project above, or one of the <Link to="/runs">runs of {project}</Link>.{" "}
          {!trash.isWhole && !trash.isReading && (
            <>
              It may be among the{" "}
              <Link to="/retention" search={{ view: "trash" }}>
                deleted runs
              </Link>
              , of which not all were read.
            </>
          )}
        </p>
      </>
    );
  }
  return <InTrash project={project} run={run} of={found} onBack={onBack} />;
}

type InTrashProps = Pick<MissingRunProps, "project" | "run" | "onBack"> & { of: Schemas["InTrash"] };

function InTrash({ project, run, of, onBack }: InTrashProps) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);

  async function undo() {
    setBusy(true);
    setError(null);
    await takeRunBack(project, run).then(onBack).catch(setError);
    setBusy(false);
  }

  return (
    <div className="panel">
      <p role="status">
        {of.deleted_by} deleted this run{of.reason && `: ${of.reason}`}. It can be taken back until{" "}
        <Time at={of.purge_at} />.
      </p>
      {error !== null && <ErrorState error={error} />}
      <div className="row">
        <Can scope="operate" reason={busy ? "It is being taken back." : undefined}>
          <button type="button" onClick={() => void undo()}>
            Take the run back
          </button>
        </Can>
        <Link to="/retention" search={{ view: "trash" }}>
          All deleted runs of {project}
        </Link>
      </div>
    </div>
  );
}
