import { Link } from "@tanstack/react-router";
import type { ReactNode } from "react";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState, Loading } from "@/components/states";
import { useNow } from "@/components/useNow";
import { Age } from "@/components/values";
import { RunName } from "@/runs/RunName";
import styles from "./AttentionList.module.css";
import { type Attention, findAttention, type Place } from "./attention";
import { type Known, useFacts, useFactsElsewhere } from "./useFacts";

/** What needs attention in a project, and in the whole service if the token sees all of it. */
export function AttentionList({ project }: { project: string }) {
  const now = useNow();
  const known = useFacts(project, now);
  return (
    <Found project={project} known={known} now={now}>
      <EmptyState title="Nothing needs attention">
        <p>
          No run is stalled, lost or without a restore point, no checkpoint is corrupt, no chunk is lost, and no
          objective (RPO, RTO) is missed{known.seesStores ? "; the scrub is in time, and every store answers" : ""}.
        </p>
      </EmptyState>
    </Found>
  );
}

/** Runs and corrupt checkpoints of all other projects that need attention; for a token that sees every project. */
export function AttentionElsewhere({ project }: { project: string }) {
  const now = useNow();
  const known = useFactsElsewhere(project);
  return (
    <Found project={project} known={known} now={now} namesProject>
      <p className="quiet">
        In no other project is a run stalled, lost or without a restore point, or a checkpoint corrupt. Choose one at
        the top for its copies, its quota and its trends.
      </p>
    </Found>
  );
}

interface FoundProps {
  project: string;
  known: Known;
  now: number;
  namesProject?: boolean;
  /** What stands there when nothing was found. */
  children: ReactNode;
}

function Found({ project, known, now, namesProject = false, children }: FoundProps) {
  const { facts, isReading, isWhole, failed, readOn } = known;
  const found = findAttention(facts, now);
  return (
    <>
      {failed && <ErrorState error={failed.error} onRetry={failed.retry} />}
      {found.length > 0 && (
        <ul className={styles.list}>
          {found.map((each) => (
            <Item key={each.key} project={project} attention={each} namesProject={namesProject} />
          ))}
        </ul>
      )}
      {isReading && !failed && <Loading what={found.length > 0 ? "the rest" : "what needs attention"} />}
      {found.length === 0 && isWhole && children}
      {!isWhole && !isReading && !failed && (
        <EmptyState title="Not everything was read">
          <p>
            There is more than this page reads by itself. What was read is complete; older entries may need attention.
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

function Item({ project, attention, namesProject }: { project: string; attention: Attention; namesProject: boolean }) {
  const { state, tone, to, detail, since } = attention;
  const whose = attention.project ?? project;
  return (
    <li className={styles.item}>
      <StateBadge state={state} tone={tone} />
      <span className={styles.subject}>
        <Subject project={whose} to={to}>
          {namesProject ? `${whose}/${attention.subject}` : attention.subject}
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
      return (
        <CheckpointName id={to.id} project={project}>
          {children}
        </CheckpointName>
      );
    case "storage":
      return (
        <Link to="/storage" search={{ project, run: to.run, late: to.part === "second" || undefined }} hash={to.part}>
          {children}
        </Link>
      );
    case "controller":
      return (
        <Link to="/operations/controllers" search={{ project, controller: to.name }}>
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
