import { Link } from "@tanstack/react-router";
import { useProject } from "@/app/project";
import { Screen } from "@/app/Screen";
import { CopyCommand } from "@/components/CopyCommand";
import { RunPicker } from "@/components/choose/RunPicker";
import { EmptyState } from "@/components/states";
import { KindOfPolicy } from "./policies/KindOfPolicy";
import { PruneTab } from "./prune/PruneTab";
import styles from "./Retention.module.css";
import { OF_THE_RUN, VIEWS, type View } from "./route";
import { TrashTab } from "./TrashTab";
import { UsageTab } from "./usage/UsageTab";
import { useChangeSearch, useRetentionSearch } from "./useRetention";

const TITLES: Record<View, string> = { policy: "Policy", prune: "Prune", trash: "Trash", usage: "Usage and cost" };

/** Which checkpoints are kept, what they take up and cost, and what was deleted. */
export function RetentionScreen() {
  const project = useProject();
  const { view = "policy", run } = useRetentionSearch();
  const change = useChangeSearch();
  return (
    <Screen
      title="Retention and cost"
      controls={
        project !== undefined && (
          <RunPicker
            label="Run"
            none="all of the project"
            project={project}
            run={run}
            onChange={(chosen) => change({ ...OF_THE_RUN, run: chosen })}
          />
        )
      }
    >
      <nav aria-label="Parts of this screen" className={styles.tabs}>
        {VIEWS.map((each) => (
          <Link
            key={each}
            from="/retention"
            to="/retention"
            search={(old) => ({ ...old, view: each === "policy" ? undefined : each })}
            activeOptions={{ exact: true, explicitUndefined: true }}
            aria-current={each === view ? "page" : undefined}
          >
            {TITLES[each]}
          </Link>
        ))}
      </nav>
      {project === undefined ? (
        <EmptyState title="No project is here yet">
          <p>A project is made with its first token. Then a training script saves into it.</p>
          <CopyCommand command="holdfast projects create my-project" label="the command that makes a project" />
        </EmptyState>
      ) : (
        <Tab key={`${project} ${run}`} view={view} project={project} run={run} />
      )}
    </Screen>
  );
}

function Tab({ view, project, run }: { view: View; project: string; run: string | undefined }) {
  if (view === "prune") return <PruneTab project={project} run={run} />;
  if (view === "trash") return <TrashTab project={project} run={run} />;
  if (view === "usage") return <UsageTab project={project} run={run} />;
  return <KindOfPolicy project={project} run={run} />;
}
