import { useAllRuns } from "@/components/choose/allRuns";
import { EmptyState, Reply } from "@/components/states";
import { OF_THE_RUN } from "../route";
import { useChangeSearch } from "../useRetention";

/** For what the API does run by run. */
export function ChooseRun({ project, why }: { project: string; why: string }) {
  const runs = useAllRuns(project);
  const change = useChangeSearch();
  return (
    <Reply of={runs} what="the runs">
      {(items) => (
        <EmptyState title={items.length === 0 ? "No run is here yet" : "Choose a run"}>
          <p>
            {items.length === 0
              ? "A training script makes its run when it opens the checkpointer for the first time."
              : why}
          </p>
          <div className="row">
            {items.slice(0, 12).map((each) => (
              <button key={each.id} type="button" onClick={() => change({ ...OF_THE_RUN, run: each.name })}>
                {each.name}
              </button>
            ))}
          </div>
        </EmptyState>
      )}
    </Reply>
  );
}
