import type { ReactNode } from "react";
import type { Schemas } from "@/api/client";
import { CopyCommand } from "@/components/CopyCommand";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { Fact, Facts, Section } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { Bytes, Nothing, Time } from "@/components/values";
import { formatCount, formatShare } from "@/format/numbers";
import { useRestorePoint } from "@/run/replies";
import styles from "./checkpoint.module.css";
import { HealthActions, TrashActions } from "./edit/actions";
import { Keeping } from "./edit/Keeping";
import { Labels, Metrics } from "./edit/Metrics";
import { Lineage } from "./Lineage";
import { nameOf } from "./selector";

type CheckpointView = Schemas["CheckpointView"];

export function SummaryPart({ checkpoint }: { checkpoint: CheckpointView }) {
  const isWhole = checkpoint.state === "committed" || checkpoint.state === "trashed";
  return (
    <>
      <Remarks checkpoint={checkpoint} />
      <What checkpoint={checkpoint} />
      <div className={styles.columns}>
        <Metrics checkpoint={checkpoint} />
        <Components checkpoint={checkpoint} />
      </div>
      <Lineage checkpoint={checkpoint} />
      {isWhole && <Keeping checkpoint={checkpoint} />}
      {isWhole && <Commands checkpoint={checkpoint} />}
      <HealthActions checkpoint={checkpoint} />
      <TrashActions checkpoint={checkpoint} />
    </>
  );
}

/** What a reader must know before anything else, each with its reason. */
function Remarks({ checkpoint }: { checkpoint: CheckpointView }) {
  const { project, run } = checkpoint;
  const decision = useRestorePoint(project, run);
  const point = decision.data?.restore_point ?? null;
  const skipped = decision.data?.skipped.find((each) => each.checkpoint_id === checkpoint.id);
  const remarks: [string, "good" | "warn" | "bad" | "calm", ReactNode][] = [];
  if (point?.checkpoint_id === checkpoint.id) {
    remarks.push(["restore point", "good", "The run would resume from it now."]);
  } else if (skipped !== undefined) {
    const other =
      point === null ? null : (
        <>
          {" "}
          The run would resume from{" "}
          <CheckpointName id={point.checkpoint_id}>step {formatCount(point.step)}</CheckpointName>.
        </>
      );
    remarks.push([
      "skipped",
      "warn",
      <>
        {skipped.detail || skipped.reason.replaceAll("_", " ")}
        {other}
      </>,
    ]);
  }
  if (checkpoint.health !== "ok") {
    remarks.push([checkpoint.health, "bad", checkpoint.health_reason ?? "The service knows no reason."]);
  }
  if (checkpoint.state === "aborted") {
    const rank = checkpoint.abort_rank === null ? "" : `Rank ${checkpoint.abort_rank}: `;
    remarks.push(["aborted", "bad", `${rank}${checkpoint.abort_reason ?? "The service knows no reason."}`]);
  }
  if (checkpoint.detached) {
    const text = "The run went on without it: it is restored by its name, and never as latest.";
    remarks.push(["detached", "warn", text]);
  }
  if (checkpoint.unproven) {
    const text = "The service has still to read back chunks that the store has not hashed.";
    remarks.push(["unproven", "warn", text]);
  }
  const lacks = checkpoint.missing_components ?? [];
  if (lacks.length > 0) {
    remarks.push(["incomplete", "bad", `It lacks what the run's first checkpoint has: ${lacks.join(", ")}.`]);
  }
  if (remarks.length === 0) return null;
  return (
    <ul className={`panel ${styles.list}`} aria-label="Remarks">
      {remarks.map(([state, tone, text]) => (
        <li key={state}>
          <StateBadge state={state} tone={tone} /> <span>{text}</span>
        </li>
      ))}
    </ul>
  );
}

function What({ checkpoint }: { checkpoint: CheckpointView }) {
  const late = checkpoint.pushed_by == null ? null : `late, by attempt ${checkpoint.pushed_by}`;
  return (
    <Section id="what" title="What it is">
      <Facts>
        <Fact name="Step">{formatCount(checkpoint.step)}</Fact>
        <Fact name="Attempt">{checkpoint.attempt}</Fact>
        <Fact name="Kind">{checkpoint.kind}</Fact>
        <Fact name="Tier">
          <StateBadge state={checkpoint.tier} />
        </Fact>
        <Fact name="Ranks sealed">
          {checkpoint.sealed_ranks} of {checkpoint.world_size}
          {checkpoint.missing_ranks.length > 0 && `; not ${checkpoint.missing_ranks.join(", ")}`}
        </Fact>
        <Fact name="Begun">
          <Time at={checkpoint.created_at} />
        </Fact>
        <Fact name={checkpoint.aborted_at === null ? "Committed" : "Aborted"}>
          <Time at={checkpoint.aborted_at ?? checkpoint.committed_at} />
        </Fact>
        <Fact name="State in the trainer">
          <Bytes count={checkpoint.logical_bytes} />
        </Fact>
        <Fact name="Its chunks">
          <Bytes count={checkpoint.chunk_bytes} />
        </Fact>
        <Fact name="Stored">
          <Bytes count={checkpoint.stored_bytes} />
        </Fact>
        <Fact name="Sent">
          <Bytes count={checkpoint.uploaded_bytes} />
        </Fact>
        <Fact name="Not sent, deduplicated">
          <Bytes count={checkpoint.deduplicated_bytes} />
        </Fact>
        <Fact name="Blocked training">
          {checkpoint.blocked_seconds == null ? (
            <Nothing why="unknown" />
          ) : (
            `${checkpoint.blocked_seconds.toFixed(2)} s`
          )}
        </Fact>
        {late !== null && <Fact name="Pushed">{late}</Fact>}
        <Fact name="Labels" wide>
          <Labels checkpoint={checkpoint} />
        </Fact>
        <Fact name="Id" wide>
          <code>{checkpoint.id}</code>
        </Fact>
        <Fact name="Digest" wide>
          {checkpoint.digest === null ? <Nothing /> : <code>{checkpoint.digest}</code>}
        </Fact>
      </Facts>
    </Section>
  );
}

function Components({ checkpoint }: { checkpoint: CheckpointView }) {
  const parts = Object.entries(checkpoint.components).sort(
    ([, one], [, other]) => other.logical_bytes - one.logical_bytes,
  );
  return (
    <Section id="components" title="Components">
      {parts.length === 0 ? (
        <p className="quiet">Its components are known once it is committed.</p>
      ) : (
        <div className={styles.wideTable}>
          <table className={styles.table}>
            <thead>
              <tr>
                <th scope="col">Component</th>
                <th scope="col">Kind</th>
                <th scope="col" className={styles.right}>
                  Size
                </th>
                <th scope="col" className={styles.right}>
                  Share
                </th>
              </tr>
            </thead>
            <tbody>
              {parts.map(([name, { kind, logical_bytes }]) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td>{kind.replaceAll("_", " ")}</td>
                  <td className={styles.right}>
                    <Bytes count={logical_bytes} />
                  </td>
                  <td className={styles.right}>
                    {checkpoint.logical_bytes === 0 ? (
                      <Nothing />
                    ) : (
                      formatShare(logical_bytes / checkpoint.logical_bytes)
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Section>
  );
}

function Commands({ checkpoint }: { checkpoint: CheckpointView }) {
  const name = nameOf(checkpoint);
  const at = `${checkpoint.step}#${checkpoint.attempt}`;
  return (
    <Section id="commands" title="Commands">
      <div className={`panel ${styles.commands}`}>
        <p>Files that torch and safetensors open</p>
        <CopyCommand command={`holdfast checkpoints pull ${name} out`} label="the command that pulls it" />
        <CopyCommand
          command={`holdfast checkpoints pull ${name} out --format safetensors`}
          label="the command that pulls it as safetensors"
        />
        <p>In the training script: the run goes on from this step</p>
        <CopyCommand command={`ckpt.restore(state, at="${at}")`} label="the call that restores it" />
        <p>Prove that it can be restored</p>
        <CopyCommand
          command={`holdfast drills start ${name}`}
          label="the command that proves that it can be restored"
        />
        <p>Read its bytes again, in every store</p>
        <CopyCommand command={`holdfast scrubs start ${name}`} label="the command that reads its bytes again" />
      </div>
    </Section>
  );
}
