import { Link, useParams } from "@tanstack/react-router";
import { useState } from "react";
import type { Schemas } from "@/api/client";
import { isGone } from "@/api/problem";
import { useProject } from "@/app/project";
import { Screen } from "@/app/Screen";
import { Figure, Figures } from "@/components/facts/Figures";
import { ForkSource } from "@/components/facts/ForkSource";
import { StateBadge } from "@/components/StateBadge";
import { ErrorState, Loading } from "@/components/states";
import { Age, Bytes, Nothing, Time } from "@/components/values";
import { formatCount, plural } from "@/format/numbers";
import { CheckpointsList } from "./CheckpointsList";
import { CompareAttempts } from "./CompareAttempts";
import { DeleteRun } from "./delete/DeleteRun";
import { MissingRun } from "./delete/MissingRun";
import { GoodputSection } from "./GoodputSection";
import { History } from "./History";
import { HourlySection } from "./HourlySection";
import { RestorePointSection } from "./RestorePointSection";
import styles from "./RunScreen.module.css";
import { useRun } from "./replies";
import { TagsAndNote } from "./TagsAndNote";

/** One run: where it stands, what it would restore, its attempts over steps, and its checkpoints. */
export function RunScreen() {
  const project = useProject();
  const { run } = useParams({ from: "/runs/$run" });
  const above = [
    <Link key="runs" to="/runs">
      Runs of {project}
    </Link>,
  ];
  const elsewhere = (
    <Link to="/retention" search={{ run }}>
      Retention and cost of this run
    </Link>
  );
  return (
    <Screen title={run} above={above} controls={elsewhere}>
      {project === undefined ? <Loading what="the run" /> : <OfRun project={project} run={run} key={project + run} />}
    </Screen>
  );
}

function OfRun({ project, run }: { project: string; run: string }) {
  const found = useRun(project, run);
  const [inTrash, setInTrash] = useState<Schemas["InTrash"] | null>(null);
  const [back, setBack] = useState<Schemas["TakenBack"] | null>(null);

  async function takenBack(taken: Schemas["TakenBack"]) {
    await found.refetch();
    setInTrash(null);
    setBack(taken);
  }

  if (inTrash !== null || isGone(found.error))
    return <MissingRun project={project} run={run} inTrash={inTrash} error={found.error} onBack={takenBack} />;
  if (found.error && found.data === undefined)
    return <ErrorState error={found.error} onRetry={() => void found.refetch()} />;
  return (
    <>
      {back !== null && <Back taken={back} />}
      {found.data ? <Facts run={found.data} /> : <Loading what="the run" />}
      <RestorePointSection project={project} run={run} />
      <History project={project} run={run} />
      <GoodputSection project={project} run={run} />
      <HourlySection project={project} run={run} />
      {found.data && <CompareAttempts project={project} run={run} latest={found.data.latest_attempt} />}
      <CheckpointsList project={project} run={run} />
      {found.data && <DeleteRun project={project} run={run} onDeleted={setInTrash} />}
    </>
  );
}

function Back({ taken }: { taken: Schemas["TakenBack"] }) {
  return (
    <p role="status">
      The run is back, and {plural(taken.checkpoints, "checkpoint")} {taken.checkpoints === 1 ? "is" : "are"} committed
      again.
      {taken.purged > 0 && ` The purge of ${plural(taken.purged, "other")} had begun: they stay deleted.`}
    </p>
  );
}

function Facts({ run }: { run: Schemas["RunView"] }) {
  return (
    <div className="panel">
      <Figures>
        <Figure name="Status">
          <StateBadge state={run.status ?? "unknown"} />
        </Figure>
        <Figure name="Last step">{run.last_step == null ? <Nothing /> : formatCount(run.last_step)}</Figure>
        <Figure name="Last heard of, ago">
          <Age since={run.last_heard_at} />
        </Figure>
        <Figure name="Attempts">{formatCount(run.latest_attempt)}</Figure>
        <Figure name="Checkpoints">{formatCount(run.committed_checkpoints)}</Figure>
        <Figure name="Stored">
          <Bytes count={run.stored_bytes} />
        </Figure>
        <Figure name="Not sent, deduplicated">
          <Bytes count={run.deduplicated_bytes} />
        </Figure>
        <Figure name="Made, ago">
          <Age since={run.created_at} />
        </Figure>
      </Figures>
      {run.forked_from && (
        <p className={styles.detail}>
          It was forked from <ForkSource source={run.forked_from} />.
        </p>
      )}
      <TagsAndNote run={run} />
      {run.status_detail && <p className={styles.detail}>{run.status_detail}</p>}
      {run.in_trash && (
        <p role="status" className={styles.detail}>
          {run.in_trash.deleted_by} deleted this run{run.in_trash.reason && `: ${run.in_trash.reason}`}. It can be taken
          back until <Time at={run.in_trash.purge_at} />.
        </p>
      )}
    </div>
  );
}
