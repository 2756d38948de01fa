import { useState } from "react";
import type { Schemas } from "@/api/client";
import { Can } from "@/components/Can";
import { Section } from "@/components/facts/Facts";
import { EmptyState } from "@/components/states";
import { Nothing } from "@/components/values";
import { editedWords } from "@/format/changes";
import styles from "../checkpoint.module.css";
import { formatMetric, readMetric } from "../metric";
import { editCheckpoint, whyNotEditable } from "./changes";
import { EditDialog } from "./EditDialog";

type CheckpointView = Schemas["CheckpointView"];

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
  const [now] = useState(checkpoint.metrics[props.name]);
  const [name, setName] = useState(props.name);
  const [text, setText] = useState(now === undefined ? "" : formatMetric(now));
  const isNew = now === undefined;

  async function save(seen: CheckpointView) {
    const value = text.trim() === "" && !isNew ? null : readMetric(text);
    await editCheckpoint(seen, { metrics: { [name.trim()]: value } });
  }

  return (
    <EditDialog
      title={isNew ? "Add a metric" : `Edit ${name}`}
      action="Save"
      checkpoint={checkpoint}
      onEdit={save}
      onClose={onClose}
    >
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
    </EditDialog>
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
  const [opened] = useState(checkpoint.labels);
  const [text, setText] = useState(opened.join(" "));

  async function save(seen: CheckpointView) {
    await editCheckpoint(seen, { labels: editedWords(opened, text, seen.labels) });
  }

  return (
    <EditDialog title="Edit the labels" action="Save" checkpoint={checkpoint} onEdit={save} onClose={onClose}>
      <p>
        <label htmlFor="labels">Labels, with spaces between them</label>
        <br />
        <input id="labels" value={text} onChange={(event) => setText(event.target.value)} placeholder="paper release" />
      </p>
      <p className="quiet">A retention policy can keep what has a label.</p>
    </EditDialog>
  );
}
