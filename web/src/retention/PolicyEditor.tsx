import { type ReactNode, useId } from "react";
import { type EditorProps, useFields } from "./policies/fields";
import styles from "./Retention.module.css";
import { type BestFields, COUNTS, documentOf, fieldsOf, type Rule, SPANS } from "./rules";

const FORM = { read: fieldsOf, write: documentOf };

/** The rules of a retention policy as fields. A checkpoint is kept if any rule keeps it. */
export function PolicyEditor(props: Omit<EditorProps, "wrong">) {
  const [fields, change] = useFields(FORM, props);
  const id = useId();

  function single(rule: Rule): ReactNode {
    return (
      <label key={rule.field} className={styles.field}>
        <span>{rule.label}</span>
        <input
          value={fields.single[rule.field] ?? ""}
          placeholder={`for example ${rule.example}`}
          autoComplete="off"
          onChange={(event) => change({ single: { ...fields.single, [rule.field]: event.target.value } })}
        />
      </label>
    );
  }

  function setBest(index: number, next: Partial<BestFields>) {
    change({ best: fields.best.map((each, at) => (at === index ? { ...each, ...next } : each)) });
  }

  return (
    <div className={styles.rules}>
      <fieldset>
        <legend>The newest, and one of each of the last …</legend>
        <div className={styles.fields}>{COUNTS.map(single)}</div>
        <p className="quiet">Numbers, or unlimited. Hours, days and weeks are those of UTC that have a checkpoint.</p>
      </fieldset>
      <fieldset>
        <legend>Spans, back from the newest checkpoint</legend>
        <div className={styles.fields}>{SPANS.map(single)}</div>
        <p className="quiet">6h, 7d, 4w, 3m (months), 1y6m.</p>
      </fieldset>
      <div className={styles.column}>
        <fieldset>
          <legend>Steps and labels</legend>
          <div className={styles.fields}>
            {single({ field: "keep_every_steps", label: "Each multiple of", example: "1000" })}
            <label className={styles.field}>
              <span>With one of these labels</span>
              <input
                value={fields.labels}
                placeholder="for example milestone, release"
                autoComplete="off"
                onChange={(event) => change({ labels: event.target.value })}
              />
            </label>
          </div>
        </fieldset>
        <fieldset>
          <legend>The best by a metric</legend>
          {fields.best.map((each, index) => (
            // biome-ignore lint/suspicious/noArrayIndexKey: a rule is its place.
            <div key={index} className={styles.fields}>
              <label className={styles.field} htmlFor={`${id}-metric-${index}`}>
                <span>Metric</span>
                <input
                  id={`${id}-metric-${index}`}
                  value={each.metric}
                  placeholder="for example loss"
                  autoComplete="off"
                  onChange={(event) => setBest(index, { metric: event.target.value })}
                />
              </label>
              <label className={styles.field}>
                <span>How many</span>
                <input
                  value={each.n}
                  inputMode="numeric"
                  onChange={(event) => setBest(index, { n: event.target.value })}
                />
              </label>
              <label className={styles.field}>
                <span>Best is</span>
                <select
                  value={each.mode}
                  onChange={(event) => setBest(index, { mode: event.target.value === "max" ? "max" : "min" })}
                >
                  <option value="min">lowest</option>
                  <option value="max">highest</option>
                </select>
              </label>
              <button
                type="button"
                aria-label={`Take the rule of ${each.metric || "no metric"} out`}
                onClick={() => change({ best: fields.best.filter((_, at) => at !== index) })}
              >
                Take out
              </button>
            </div>
          ))}
          <button type="button" onClick={() => change({ best: [...fields.best, { metric: "", mode: "min", n: "3" }] })}>
            Add a metric
          </button>
        </fieldset>
      </div>
    </div>
  );
}
