import { Link } from "@tanstack/react-router";
import { PolicyTab } from "../PolicyTab";
import styles from "../Retention.module.css";
import { OTHER_KINDS } from "../route";
import { useRetentionSearch } from "../useRetention";
import { KINDS } from "./kinds";
import { PolicyOfKind } from "./PolicyOfKind";

/** The policies of a project or a run, one kind at a time. */
export function KindOfPolicy({ project, run }: { project: string; run: string | undefined }) {
  const { kind } = useRetentionSearch();
  return (
    <>
      <nav aria-label="Kinds of policies" className={styles.kinds}>
        {[undefined, ...OTHER_KINDS].map((each) => (
          <Link
            key={each ?? "retention"}
            from="/retention"
            to="/retention"
            // An edit is of one kind.
            search={(old) => ({ ...old, kind: each, draft: undefined, begun: undefined })}
            activeOptions={{ exact: true, explicitUndefined: true }}
            aria-current={each === kind ? "page" : undefined}
          >
            {each === undefined ? "Retention" : KINDS[each].title}
          </Link>
        ))}
      </nav>
      {kind === undefined ? (
        <PolicyTab project={project} run={run} />
      ) : (
        <PolicyOfKind key={kind} kind={kind} project={project} run={run} />
      )}
    </>
  );
}
