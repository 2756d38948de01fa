import { useNavigate, useSearch } from "@tanstack/react-router";
import { useProject } from "@/app/project";
import { Screen } from "@/app/Screen";
import { EmptyState } from "@/components/states";
import { RunsTable } from "./RunsTable";
import { RUN_STATUSES, type RunStatus } from "./route";

/** All runs of a project, the newest first, or those of one status. */
export function RunsScreen() {
  const project = useProject();
  const { status } = useSearch({ from: "/runs" });
  const navigate = useNavigate({ from: "/runs" });
  const filter = (
    <label>
      Status{" "}
      <select
        value={status ?? ""}
        onChange={(event) => {
          const chosen = (event.target.value || undefined) as RunStatus | undefined;
          void navigate({ search: (old) => ({ ...old, status: chosen }) });
        }}
      >
        <option value="">all</option>
        {RUN_STATUSES.map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
    </label>
  );
  return (
    <Screen title="Runs" controls={filter}>
      {project === undefined ? (
        <EmptyState title="No project is here yet" />
      ) : (
        <RunsTable
          project={project}
          statuses={status === undefined ? [] : [status]}
          empty={
            <EmptyState title={status === undefined ? "No run is here yet" : `No run is ${status}`}>
              <p>A training script makes its run when it opens the checkpointer for the first time.</p>
            </EmptyState>
          }
        />
      )}
    </Screen>
  );
}
