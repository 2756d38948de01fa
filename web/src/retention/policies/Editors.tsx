import styles from "../Retention.module.css";
import type { OtherKind } from "../route";
import { type EditorProps, KindsOfCheckpoints, TextField, useFields, WrongField, wrongAt } from "./fields";
import { copies, objectives, TARGETS, type TierRuleFields, tiers } from "./kinds";

const MOST_TIER_RULES = 4;

/** The form of a policy. */
export function Editor({ kind, ...props }: EditorProps & { kind: OtherKind }) {
  if (kind === "copies") return <CopiesEditor {...props} />;
  if (kind === "tiers") return <TiersEditor {...props} />;
  return <ObjectivesEditor {...props} />;
}

function ObjectivesEditor(props: EditorProps) {
  const [fields, change] = useFields(objectives, props);
  return (
    <div className={styles.rules}>
      <fieldset>
        <legend>When the first store is lost</legend>
        <div className={styles.fields}>
          <TextField
            label="A committed state may lack a copy for (RPO)"
            example="1h"
            value={fields.rpo}
            wrong={wrongAt(props.wrong, "rpo_seconds")}
            onChange={(rpo) => change({ rpo })}
          />
          <TextField
            label="A restore must be done within (RTO)"
            example="15min"
            value={fields.rto}
            wrong={wrongAt(props.wrong, "rto_seconds")}
            onChange={(rto) => change({ rto })}
          />
        </div>
        <p className="quiet">90s, 15min, 6h or 2d. A number alone is seconds.</p>
      </fieldset>
    </div>
  );
}

function CopiesEditor(props: EditorProps) {
  const { wrong } = props;
  const [fields, change] = useFields(copies, props);
  const { best } = fields;
  return (
    <div className={styles.rules}>
      <fieldset>
        <legend>Which checkpoints; with no condition every one</legend>
        <div className={styles.fields}>
          <TextField
            label="With one of these labels"
            example="milestone, release"
            value={fields.labels}
            wrong={wrongAt(wrong, "labels")}
            onChange={(labels) => change({ labels })}
          />
          <TextField
            label="Each multiple of so many steps"
            example="1000"
            value={fields.everySteps}
            wrong={wrongAt(wrong, "every_steps")}
            onChange={(everySteps) => change({ everySteps })}
          />
        </div>
        <KindsOfCheckpoints
          legend="Of these kinds"
          kinds={fields.kinds}
          wrong={wrongAt(wrong, "kinds")}
          onChange={(kinds) => change({ kinds })}
        />
      </fieldset>
      <fieldset>
        <legend>The best by a metric</legend>
        <div className={styles.fields}>
          <TextField
            label="Metric"
            example="loss"
            value={best.metric}
            wrong={wrongAt(wrong, "best.metric")}
            onChange={(metric) => change({ best: { ...best, metric } })}
          />
          <TextField
            label="How many"
            example="3"
            value={best.n}
            wrong={wrongAt(wrong, "best.n")}
            onChange={(n) => change({ best: { ...best, n } })}
          />
          <label className={styles.field}>
            <span>Best is</span>
            <select
              value={best.mode}
              onChange={({ target }) => change({ best: { ...best, mode: target.value === "max" ? "max" : "min" } })}
            >
              <option value="min">lowest</option>
              <option value="max">highest</option>
            </select>
          </label>
        </div>
      </fieldset>
    </div>
  );
}

function TiersEditor(props: EditorProps) {
  const { wrong } = props;
  const [fields, change] = useFields(tiers, props);

  function setRule(index: number, next: Partial<TierRuleFields>) {
    change({ rules: fields.rules.map((each, at) => (at === index ? { ...each, ...next } : each)) });
  }

  return (
    <div className={styles.rules}>
      <fieldset>
        <legend>By age, the earliest first</legend>
        {fields.rules.map((rule, index) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: a rule is its place.
          <div key={index} className={styles.fields}>
            <TextField
              label="Longer ago than"
              example="7d"
              value={rule.after}
              wrong={wrongAt(wrong, `rules.${index}`)}
              onChange={(after) => setRule(index, { after })}
            />
            <label className={styles.field}>
              <span>Moves to</span>
              <select value={rule.target} onChange={({ target }) => setRule(index, { target: target.value })}>
                <option value="">choose</option>
                {Object.entries(TARGETS).map(([target, words]) => (
                  <option key={target} value={target}>
                    {words}
                  </option>
                ))}
              </select>
            </label>
            <button
              type="button"
              aria-label={`Take the rule ${index + 1} out`}
              onClick={() => change({ rules: fields.rules.filter((_, at) => at !== index) })}
            >
              Take out
            </button>
          </div>
        ))}
        {fields.rules.length < MOST_TIER_RULES && (
          <button type="button" onClick={() => change({ rules: [...fields.rules, { after: "", target: "" }] })}>
            Add a rule
          </button>
        )}
        <WrongField wrong={wrong.rules} />
        <p className="quiet">6h, 7d, 4w, 3m (months), 1y6m, since the commit.</p>
      </fieldset>
      <fieldset>
        <legend>What no rule moves</legend>
        <div className={styles.fields}>
          <TextField
            label="With one of these labels"
            example="milestone"
            value={fields.labels}
            wrong={wrongAt(wrong, "stay_hot.labels")}
            onChange={(labels) => change({ labels })}
          />
        </div>
        <KindsOfCheckpoints
          legend="Of these kinds"
          kinds={fields.kinds}
          wrong={wrongAt(wrong, "stay_hot.kinds")}
          onChange={(kinds) => change({ kinds })}
        />
        <label>
          <input
            type="checkbox"
            checked={fields.pinned}
            onChange={({ target }) => change({ pinned: target.checked })}
          />{" "}
          What is pinned
        </label>
      </fieldset>
    </div>
  );
}
