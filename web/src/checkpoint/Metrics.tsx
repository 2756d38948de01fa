import { useState } from "react";
import { api, type Schemas } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { EmptyState } from "@/components/states";
import { Nothing } from "@/components/values";
import { useChanged, whyNotEditable } from "./changes";
import styles from "./checkpoint.module.css";
import { Section } from "./Facts";
import { formatMetric, readMetric } from "./metric";

type CheckpointView = Schemas["CheckpointView"];
type EditCheckpoint = Schemas["EditCheckpoint"];

/** Edits the version that the reader has seen: if somebody was faster, the service says so. */
export async function editCheckpoint(checkpoint: CheckpointView, body: EditCheckpoint): Promise<void> {
  await api.PATCH("/v1/checkpoints/{checkpoint_id}", {
    params: { path: { checkpoint_id: checkpoint.id }, header: { "if-match": checkpoint.etag } },
    body,
  });
}

export function Metrics({ checkpoint }: { checkpoint: CheckpointView }) {
  const [edited, setEdited] = useState<string | null>(null);
  const names = Object.keys(checkpoint.metrics).sort();
  const reason = whyNotEditable(checkpoint);
  const add = (
    <Can scope="operate" reason={reason}>
      <button type="button" onClick={() => setEdited("")}>
        Add a metric
      </button>
    </Can>
  );
  return (
    <Section id="metrics" title="Metrics" aside={add}>
      {names.length === 0 ? (
        <EmptyState title="It has no metrics">
          <p>
            A script gives them with <code>ckpt.step(…, metrics=…)</code>; what was measured later is added here, and
            counts for <code>best:</code> and retention too.
          </p>
        </EmptyState>
      ) : (
        <div className={styles.wideTable}>
          <table className={styles.table}>
            <thead>
              <tr>
                <th scope="col">Metric</th>
                <th scope="col" className={styles.right}>
                  Value
                </th>
                <th scope="col">
                  <span className="visually-hidden">Change</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {names.map((name) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td className={styles.right}>{formatMetric(checkpoint.metrics[name])}</td>
                  <td className={styles.right}>
                    <Can scope="operate" reason={reason}>
                      <button type="button" onClick={() => setEdited(name)} aria-label={`Edit ${name}`}>
                        Edit
                      </button>
                    </Can>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {edited !== null && <EditMetric checkpoint={checkpoint} name={edited} onClose={() => setEdited(null)} />}
    </Section>
  );
}

/** `name`: of the metric; empty: a new one. */
function EditMetric(props: { checkpoint: CheckpointView; name: string; onClose: () => void }) {
  const { checkpoint, onClose } = props;
  const now = checkpoint.metrics[props.name];
  const [name, setName] = useState(props.name);
  const [text, setText] = useState(now === undefined ? "" : formatMetric(now));
  const changed = useChanged();
  const isNew = now === undefined;

  async function save() {
    const value = text.trim() === "" && !isNew ? null : readMetric(text);
    await editCheckpoint(checkpoint, { metrics: { [name.trim()]: value } });
    await changed();
  }

  return (
    <ConfirmDialog title={isNew ? "Add a metric" : `Edit ${name}`} action="Save" onConfirm={save} onClose={onClose}>
      {isNew && (
        <p>
          <label htmlFor="metric-name">Name</label>
          <br />
          <input
            id="metric-name"
            value={name}
            onChange={(event) => setName(event.target.value)}
            placeholder="eval_loss"
            required
            maxLength={100}
          />
        </p>
      )}
      <p>
        <label htmlFor="metric-value">Value</label>
        <br />
        <input
          id="metric-value"
          value={text}
          onChange={(event) => setText(event.target.value)}
          inputMode="decimal"
          required={isNew}
          aria-describedby="metric-help"
        />
      </p>
      <p id="metric-help" className="quiet">
        A number, nan, inf or -inf. {!isNew && "Empty: the metric is taken away. "}
        <code>best:</code> and the policies use it from now on.
      </p>
    </ConfirmDialog>
  );
}

export function Labels({ checkpoint }: { checkpoint: CheckpointView }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <span className="row">
      {checkpoint.labels.length === 0 ? (
        <Nothing />
      ) : (
        checkpoint.labels.map((label) => (
          <code key={label} className={styles.label}>
            {label}
          </code>
        ))
      )}
      <Can scope="operate" reason={whyNotEditable(checkpoint)}>
        <button type="button" onClick={() => setOpen(true)} aria-label="Edit the labels">
          Edit
        </button>
      </Can>
      {isOpen && <EditLabels checkpoint={checkpoint} onClose={() => setOpen(false)} />}
    </span>
  );
}

function EditLabels({ checkpoint, onClose }: { checkpoint: CheckpointView; onClose: () => void }) {
  const [text, setText] = useState(checkpoint.labels.join(" "));
  const changed = useChanged();

  async function save() {
    const labels = [...new Set(text.split(/[\s,]+/).filter(Boolean))];
    await editCheckpoint(checkpoint, { labels });
    await changed();
  }

  return (
    <ConfirmDialog title="Edit the labels" action="Save" onConfirm={save} onClose={onClose}>
      <p>
        <label htmlFor="labels">Labels, with spaces between them</label>
        <br />
        <input id="labels" value={text} onChange={(event) => setText(event.target.value)} placeholder="paper release" />
      </p>
      <p className="quiet">A retention policy can keep what has a label.</p>
    </ConfirmDialog>
  );
}
