import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { Section } from "@/components/facts/Facts";
import { ErrorState } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import styles from "../checkpoint.module.css";
import { nameOf } from "../selector";
import { editCheckpoint, useChanged, whyNotEditable } from "./changes";
import { EditDialog } from "./EditDialog";

type CheckpointView = Schemas["CheckpointView"];
type Pruned = Schemas["Pruned"];

export function Reason(props: { value: string; onChange: (text: string) => void; help: string; required?: boolean }) {
  const { value, onChange, help, required = true } = props;
  return (
    <p>
      <label htmlFor="reason">Reason{required ? "" : ", if there is one"}</label>
      <br />
      <textarea
        id="reason"
        className={styles.reason}
        rows={2}
        value={value}
        onChange={(event) => onChange(event.target.value)}
        required={required}
        maxLength={1000}
        aria-describedby="reason-help"
      />
      <br />
      <span id="reason-help" className="quiet">
        {help}
      </span>
    </p>
  );
}

type Said = "ok" | "diverged" | "quarantined";

/** What a person says of its health. `corrupt` is the service's word alone. */
export function HealthActions({ checkpoint }: { checkpoint: CheckpointView }) {
  const [said, setSaid] = useState<Said | null>(null);
  const { health } = checkpoint;
  const corrupt =
    health === "corrupt"
      ? "It is corrupt: the service sets and clears that by itself, when every chunk has a good copy again."
      : undefined;
  const reason = whyNotEditable(checkpoint) ?? corrupt;
  const already = (word: Said) => (health === word ? `It is ${word === "ok" ? "healthy" : word} already.` : undefined);
  return (
    <Section id="health" title="Health">
      <div className="row">
        <Can scope="operate" reason={reason ?? already("quarantined")}>
          <button type="button" onClick={() => setSaid("quarantined")}>
            Quarantine
          </button>
        </Can>
        <Can scope="operate" reason={reason ?? already("diverged")}>
          <button type="button" onClick={() => setSaid("diverged")}>
            Mark diverged
          </button>
        </Can>
        <Can scope="operate" reason={reason ?? already("ok")}>
          <button type="button" onClick={() => setSaid("ok")}>
            Mark healthy
          </button>
        </Can>
      </div>
      {said !== null && <SayHealth checkpoint={checkpoint} health={said} onClose={() => setSaid(null)} />}
    </Section>
  );
}

const HEALTH: Record<Said, { title: string; action: string; effect: string }> = {
  ok: {
    title: "Mark healthy",
    action: "Mark healthy",
    effect: "Jobs may resume from it again.",
  },
  diverged: {
    title: "Mark diverged",
    action: "Mark diverged",
    effect: "No job resumes from it, unless it is named.",
  },
  quarantined: {
    title: "Quarantine",
    action: "Quarantine",
    effect: "No job resumes from it until a person marks it healthy.",
  },
};

function SayHealth(props: { checkpoint: CheckpointView; health: Said; onClose: () => void }) {
  const { checkpoint, health, onClose } = props;
  const { title, action, effect } = HEALTH[health];
  const [reason, setReason] = useState("");

  return (
    <EditDialog
      title={`${title}: ${nameOf(checkpoint)}`}
      action={action}
      checkpoint={checkpoint}
      onEdit={(seen) => editCheckpoint(seen, { health, health_reason: reason.trim() || null })}
      onClose={onClose}
    >
      <p>{effect}</p>
      <Reason
        value={reason}
        onChange={setReason}
        required={health !== "ok"}
        help="Shown where the checkpoint is skipped, and in its history."
      />
    </EditDialog>
  );
}

/** Into the trash, with what that frees and what keeps it; and back. */
export function TrashActions({ checkpoint }: { checkpoint: CheckpointView }) {
  if (checkpoint.state === "trashed") return <InTrash checkpoint={checkpoint} />;
  if (checkpoint.state === "committed") return <ToTrash checkpoint={checkpoint} />;
  return null;
}

function ToTrash({ checkpoint }: { checkpoint: CheckpointView }) {
  const { id, project, run } = checkpoint;
  const [shown, setShown] = useState<Pruned | null>(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const [isAsking, setAsking] = useState(false);
  const [reason, setReason] = useState("");
  const changed = useChanged();

  async function prune(dryRun: boolean): Promise<Pruned> {
    const { data } = await api.POST("/v1/projects/{project}/runs/{run}/retention/prune", {
      params: { path: { project, run } },
      body: { checkpoint_ids: [id], dry_run: dryRun, reason: reason.trim(), all_of_run: false },
    });
    if (data === undefined) throw new Error("The service gave no answer to read. Look at the checkpoint again.");
    return data;
  }

  async function show() {
    setBusy(true);
    setError(null);
    try {
      setShown(await prune(true));
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  }

  async function trash() {
    const done = await prune(false);
    const kept = done.left[0];
    if (kept !== undefined) throw new Error(`It is kept: ${kept.reasons.map((each) => each.detail).join(" ")}`);
    setShown(null);
    await changed();
  }

  return (
    <Section id="trash" title="Delete">
      <Can scope="operate" reason={busy ? "The service looks what would go." : undefined}>
        <button type="button" onClick={() => void show()}>
          See what would go
        </button>
      </Can>
      {error !== null && <ErrorState error={error} />}
      {shown !== null && (
        <div className={`panel ${styles.plan}`} role="status">
          <Plan shown={shown} />
          {shown.trashed.length > 0 && (
            <button type="button" className="danger" onClick={() => setAsking(true)}>
              Move to the trash
            </button>
          )}
        </div>
      )}
      {isAsking && shown !== null && (
        <ConfirmDialog
          title={`Move ${nameOf(checkpoint)} to the trash`}
          action="Move to the trash"
          typed={String(shown.trashed.length)}
          onConfirm={trash}
          onClose={() => setAsking(false)}
        >
          <Plan shown={shown} />
          <Reason value={reason} onChange={setReason} required={false} help="For those who look for it later." />
        </ConfirmDialog>
      )}
    </Section>
  );
}

function Plan({ shown }: { shown: Pruned }) {
  const stores = Object.entries(shown.freed.by_store ?? {});
  return (
    <>
      {shown.trashed.length > 0 && (
        <p>
          {shown.trashed.length} checkpoint goes to the trash, and can be taken back{" "}
          {shown.purge_at === null ? (
            "until its purge"
          ) : (
            <>
              until <Time at={shown.purge_at} />
            </>
          )}
          . Then <Bytes count={shown.freed.bytes} /> are freed
          {stores.length > 0 && ": "}
          {stores.map(([url, bytes], index) => (
            <span key={url}>
              {index > 0 && ", "}
              <Bytes count={bytes} /> in {url}
            </span>
          ))}
          . What other checkpoints share with it is kept.
        </p>
      )}
      {shown.left.map((left) => (
        <div key={left.checkpoint_id}>
          <p>Nothing expires. It is kept, because:</p>
          <ul>
            {left.reasons.map((each) => (
              <li key={each.kind}>
                <strong>{each.kind.replaceAll("_", " ")}</strong>: {each.detail}
              </li>
            ))}
          </ul>
        </div>
      ))}
    </>
  );
}

function InTrash({ checkpoint }: { checkpoint: CheckpointView }) {
  const [isAsking, setAsking] = useState(false);
  const [pin, setPin] = useState("");
  const changed = useChanged();
  const { trashed_by: by, trash_reason: why } = checkpoint;

  async function undelete() {
    await api.POST("/v1/checkpoints/{checkpoint_id}/undelete", {
      params: { path: { checkpoint_id: checkpoint.id } },
      body: { pin: pin === "" ? null : pin === "yes" },
    });
    await changed();
  }

  return (
    <Section id="trash" title="In the trash">
      <p>
        Since <Time at={checkpoint.trashed_at} />, by {by ?? "?"}
        {why ? `: ${why}` : ""}. It can be taken back until <Time at={checkpoint.purge_at} />
        {checkpoint.trashed_by === "policy" && ", or until a disk or the quota is short"}.
      </p>
      <Can
        scope="operate"
        reason={by === "run" ? "Its whole run was deleted: take the run back on the run’s screen." : undefined}
      >
        <button type="button" onClick={() => setAsking(true)}>
          Take it back
        </button>
      </Can>
      {isAsking && (
        <ConfirmDialog
          title={`Take ${nameOf(checkpoint)} back`}
          action="Take it back"
          onConfirm={undelete}
          onClose={() => setAsking(false)}
        >
          <p>
            <label htmlFor="pin">Pin it, so that no policy expires it again</label>
            <br />
            <select id="pin" value={pin} onChange={(event) => setPin(event.target.value)}>
              <option value="">for a while, if a policy had expired it</option>
              <option value="yes">yes</option>
              <option value="no">no</option>
            </select>
          </p>
        </ConfirmDialog>
      )}
    </Section>
  );
}
