import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useProject } from "@/app/project";
import { Screen } from "@/app/Screen";
import { Choice } from "@/components/choose/Choice";
import { EmptyState } from "@/components/states";
import { RunsTable } from "./RunsTable";
import { RUN_STATUSES } from "./route";

/** All runs of a project, the newest first, or those of one status or with one tag. */
export function RunsScreen() {
  const project = useProject();
  const { status, tag } = useSearch({ from: "/runs" });
  const navigate = useNavigate({ from: "/runs" });
  const filter = (
    <form
      className="row"
      onSubmit={(event) => {
        event.preventDefault();
        const typed = String(new FormData(event.currentTarget).get("tag") ?? "").trim();
        void navigate({ search: (old) => ({ ...old, tag: typed || undefined }) });
      }}
    >
      <Choice
        label="Status"
        value={status}
        offered={RUN_STATUSES}
        onChange={(chosen) => void navigate({ search: (old) => ({ ...old, status: chosen }) })}
      />
      <label>
        Tag <input name="tag" defaultValue={tag} key={tag} autoComplete="off" size={14} />
      </label>
      <button type="submit">Filter</button>
    </form>
  );
  const controls = (
    <div className="row">
      {filter}
      <Link to="/retention" search={{ view: "trash" }}>
        Deleted runs
      </Link>
    </div>
  );
  const what = [status && `is ${status}`, tag && `has the tag ${tag}`].filter(Boolean).join(" and ");
  return (
    <Screen title="Runs" controls={controls}>
      {project === undefined ? (
        <EmptyState title="No project is here yet" />
      ) : (
        <RunsTable
          project={project}
          statuses={status === undefined ? [] : [status]}
          tag={tag}
          empty={
            <EmptyState title={what === "" ? "No run is here yet" : `No run ${what}`}>
              <p>A training script makes its run when it opens the checkpointer for the first time.</p>
            </EmptyState>
          }
        />
      )}
    </Screen>
  );
}
