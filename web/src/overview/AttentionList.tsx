import { Link } from "@tanstack/react-router";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState, Loading } from "@/components/states";
import { useNow } from "@/components/useNow";
import { Age } from "@/components/values";
import { RunName } from "@/runs/RunName";
import styles from "./AttentionList.module.css";
import { type Attention, findAttention, type Place } from "./attention";
import { useFacts } from "./useFacts";

/** What needs attention in a project, and in the whole service if the token sees all of it. */
export function AttentionList({ project }: { project: string }) {
  const now = useNow();
  const { facts, isReading, isWhole, seesStores, failed, readOn } = useFacts(project, now);
  const found = findAttention(facts, now);
  return (
    <>
      {failed && <ErrorState error={failed.error} onRetry={failed.retry} />}
      {found.length > 0 && (
        <ul className={styles.list}>
          {found.map((each) => (
            <Item key={each.key} project={project} attention={each} />
          ))}
        </ul>
      )}
      {isReading && !failed && <Loading what={found.length > 0 ? "the rest" : "what needs attention"} />}
      {found.length === 0 && isWhole && (
        <EmptyState title="Nothing needs attention">
          <p>
            No run is stalled, lost or without a restore point, and no chunk is lost
            {seesStores ? ", and every store answers" : ""}.
          </p>
        </EmptyState>
      )}
      {!isWhole && !isReading && !failed && (
        <EmptyState title="Not everything was read">
          <p>
            The project has more than this page reads by itself. What was read is complete; older entries may need
            attention.
          </p>
          {readOn && (
            <button type="button" onClick={readOn}>
              Read on
            </button>
          )}
        </EmptyState>
      )}
    </>
  );
}

function Item({ project, attention }: { project: string; attention: Attention }) {
  const { state, tone, subject, to, detail, since } = attention;
  return (
    <li className={styles.item}>
      <StateBadge state={state} tone={tone} />
      <span className={styles.subject}>
        <Subject project={project} to={to}>
          {subject}
        </Subject>
      </span>
      <span className={styles.detail}>{detail}</span>
      {since !== null && (
        <span className={`quiet ${styles.since}`}>
          <Age since={since} /> ago
        </span>
      )}
    </li>
  );
}

/** As a link to the screen where something can be done. */
function Subject({ project, to, children }: { project: string; to: Place; children: string }) {
  switch (to.screen) {
    case "run":
      return (
        <RunName project={project} run={to.run}>
          {children}
        </RunName>
      );
    case "checkpoint":
      return <CheckpointName id={to.id}>{children}</CheckpointName>;
    case "checkpoints":
      return (
        <Link to="/checkpoints" search={{ project }}>
          {children}
        </Link>
      );
    case "storage":
      return (
        <Link to="/storage" search={{ project }}>
          {children}
        </Link>
      );
    case "usage":
      return (
        <Link to="/retention" search={{ project, view: "usage" }}>
          {children}
        </Link>
      );
  }
}
