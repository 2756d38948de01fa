import { CopyCommand } from "@/components/CopyCommand";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { Figure, Figures } from "@/components/facts/Figures";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Age, Bytes } from "@/components/values";
import { formatCount } from "@/format/numbers";
import styles from "./RunScreen.module.css";
import { useRestorePoint } from "./replies";

/** What a job that starts now would restore, and each newer checkpoint with the reason why it would not. */
export function RestorePointSection({ project, run }: { project: string; run: string }) {
  const decision = useRestorePoint(project, run);
  return (
    <section aria-labelledby="restore-point">
      <h2 id="restore-point">Restore point</h2>
      <Reply of={decision} what="the restore point">
        {({ restore_point: point, skipped, ever_committed: everCommitted, note }) => (
          <div className="panel">
            {point === null ? (
              <EmptyState title={everCommitted ? "No checkpoint can be restored now" : "Nothing was ever committed"}>
                <p>
                  {everCommitted
                    ? "A job that starts now is refused. The reasons are below; a quarantine is released, and a trashed checkpoint taken back, by hand."
                    : "A job that starts now begins from nothing."}
                </p>
              </EmptyState>
            ) : (
              <>
                <Figures>
                  <Figure name="Step">
                    <CheckpointName id={point.checkpoint_id}>{formatCount(point.step)}</CheckpointName>
                  </Figure>
                  <Figure name="Saved by">attempt #{point.attempt}</Figure>
                  <Figure name="Age">
                    <Age since={point.committed_at} />
                  </Figure>
                  <Figure name="State">
                    <Bytes count={point.logical_bytes} /> on {formatCount(point.world_size)}{" "}
                    {point.world_size === 1 ? "rank" : "ranks"}
                  </Figure>
                </Figures>
                <CopyCommand
                  command={`holdfast checkpoints pull ${project}/${run}@${point.checkpoint_id} ./step-${point.step}`}
                  label="the command that fetches the restore point"
                />
              </>
            )}
            {note !== "" && <p role="status">{note}</p>}
            <h3>Why nothing newer</h3>
            {skipped.length === 0 ? (
              <p className="quiet">There is nothing newer: no later checkpoint was begun.</p>
            ) : (
              <div className={styles.scroll}>
                <table className={styles.table}>
                  <caption className="visually-hidden">Newer checkpoints that are not the restore point</caption>
                  <thead>
                    <tr>
                      <th scope="col">Step</th>
                      <th scope="col">Attempt</th>
                      <th scope="col">Skipped because</th>
                      <th scope="col">Detail</th>
                    </tr>
                  </thead>
                  <tbody>
                    {skipped.map((each) => (
                      <tr key={each.checkpoint_id}>
                        <th scope="row">
                          <CheckpointName id={each.checkpoint_id}>{formatCount(each.step)}</CheckpointName>
                        </th>
                        <td>#{each.attempt}</td>
                        <td>
                          <StateBadge state={each.reason} />
                        </td>
                        <td>{each.detail}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            )}
          </div>
        )}
      </Reply>
    </section>
  );
}
