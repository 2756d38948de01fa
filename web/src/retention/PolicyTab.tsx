import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import type { Schemas } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { EmptyState, ErrorState, Loading, Reply } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { formatBytes, formatCount } from "@/format/numbers";
import { applyPolicy, deletePolicy, type Level, type Outcome, planOf } from "./actions";
import { CostLater, CostNow } from "./CostChange";
import { freedByStore } from "./cost";
import { Done } from "./Done";
import { Figure, plural } from "./Figure";
import { PlansByRun } from "./PlansByRun";
import { PlanTable } from "./PlanTable";
import { PolicyEditor } from "./PolicyEditor";
import styles from "./Retention.module.css";
import { type PolicyDocument, rulesInWords, sameRules } from "./rules";
import { MOST_RUNS, policyQuery, useChangeSearch, usePlans, useRetentionSearch, useRuns } from "./useRetention";

/** A policy is edited, and what stays and goes under it is seen at once; then it is applied. */
export function PolicyTab({ project, run }: { project: string; run: string | undefined }) {
  const policy = useQuery(policyQuery(project, run));
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  return (
    <>
      {outcome !== null && <Done outcome={outcome} onClose={() => setOutcome(null)} />}
      <Reply of={policy} what="the policy">
        {(found) => <Editing project={project} run={run} found={found} onOutcome={setOutcome} />}
      </Reply>
    </>
  );
}

interface EditingProps {
  project: string;
  run: string | undefined;
  /** What holds now. */
  found: Schemas["PolicyView"] | null;
  onOutcome: (outcome: Outcome | null) => void;
}

function Editing({ project, run, found, onOutcome }: EditingProps) {
  const { draft } = useRetentionSearch();
  const change = useChangeSearch();
  // A new key gives the editor's fields anew: somebody else's edit is shown, unless it would take the reader's away.
  const [edition, setEdition] = useState(0);
  const [etag, setEtag] = useState(found?.etag);
  if (found?.etag !== etag) {
    setEtag(found?.etag);
    if (draft === undefined) setEdition(edition + 1);
  }
  const inForce: PolicyDocument = found?.document ?? {};
  const shown = draft ?? inForce;
  const edited = draft !== undefined && !sameRules(draft, inForce);
  const own = found !== null && (run === undefined || found.level === "run") ? found : null;
  const level: Level = { project, run: run ?? null, own };

  function reset() {
    change({ draft: undefined });
    setEdition((old) => old + 1);
  }

  return (
    <>
      <p>
        <WhereFrom run={run} found={found} />
      </p>
      <PolicyEditor
        key={edition}
        initial={shown}
        onChange={(document) =>
          change({ draft: sameRules(document, inForce) ? undefined : document }, { replace: true })
        }
      />
      <div className={styles.bar}>
        <span role="status">
          {edited ? "Edited, and not saved." : found === null ? "Nothing is edited yet." : "As it is in force."}
        </span>
        {edited && (
          <button type="button" onClick={reset}>
            Discard the edit
          </button>
        )}
        {own !== null && !edited && <DeletePolicy level={level} onDone={onOutcome} />}
      </div>
      {found === null && !edited ? (
        <EmptyState title="Without a policy nothing ever expires">
          <p>
            Give a rule above, for example 5 of the newest, and see what would go. Nothing is done before you apply it.
          </p>
        </EmptyState>
      ) : run === undefined ? (
        <OfProject project={project} level={level} document={shown} edited={edited} onApplied={applied} />
      ) : (
        <OfRun project={project} run={run} level={level} document={shown} edited={edited} onApplied={applied} />
      )}
    </>
  );

  function applied(what: Outcome) {
    onOutcome(what);
    change({ draft: undefined });
  }
}

function WhereFrom({ run, found }: { run: string | undefined; found: Schemas["PolicyView"] | null }) {
  if (found === null)
    return (
      <>
        {run === undefined
          ? "The project has no retention policy."
          : "Neither this run nor its project has a retention policy."}
      </>
    );
  const words = rulesInWords(found.document);
  const version = (
    <>
      version {found.version} by {found.updated_by}, <Time at={found.updated_at} />
    </>
  );
  if (run === undefined)
    return (
      <>
        The project’s policy, {version}: <code>{words}</code>. It holds for each run without a policy of its own.
      </>
    );
  return found.level === "run" ? (
    <>
      The run’s own policy, {version}: <code>{words}</code>.
    </>
  ) : (
    <>
      The project’s policy holds for this run, {version}: <code>{words}</code>. What you save here becomes the run’s
      own.
    </>
  );
}

interface EffectProps {
  project: string;
  level: Level;
  document: PolicyDocument;
  edited: boolean;
  onApplied: (outcome: Outcome) => void;
}

function OfRun({ run, ...props }: EffectProps & { run: string }) {
  const { project, document, edited } = props;
  const plans = usePlans(project, [run], edited ? document : null, "all");
  const plan = plans.data?.[0];
  if (plan === undefined)
    return plans.error ? (
      <ErrorState error={plans.error} onRetry={() => void plans.refetch()} />
    ) : (
      <Loading what="what stays and goes" />
    );
  const stale = plans.isPlaceholderData || plans.error !== null;
  return (
    <section aria-labelledby="effect">
      <h2 id="effect">What stays and what goes</h2>
      {plans.error ? <ErrorState error={plans.error} /> : null}
      <div className={stale ? styles.stale : undefined} aria-busy={plans.isPlaceholderData}>
        <dl className={styles.figures}>
          <Effect plans={[plan]} />
          <CostNow project={project} run={run} freedByStore={freedByStore([plan])} />
          <CostLater project={project} run={run} draft={document} edited={edited && !plans.error} />
        </dl>
        <Notes notes={plan.notes} />
      </div>
      <Apply {...props} plans={[plan]} stale={stale} />
      <div className={stale ? styles.stale : undefined}>
        <PlanTable plan={plan} />
      </div>
    </section>
  );
}

function OfProject(props: EffectProps) {
  const { project } = props;
  const runs = useRuns(project);
  return (
    <Reply of={runs} what="the runs">
      {({ items, next_cursor }) =>
        items.length === 0 ? (
          <EmptyState title="No run is here yet">
            <p>The policy can be saved now; it then holds for each run that comes.</p>
          </EmptyState>
        ) : (
          <OfRuns {...props} runs={items.map((each) => each.name)} isAll={next_cursor == null} />
        )
      }
    </Reply>
  );
}

function OfRuns({ runs, isAll, ...props }: EffectProps & { runs: string[]; isAll: boolean }) {
  const { project, document, edited } = props;
  const { listed } = useRetentionSearch();
  const plans = usePlans(project, runs, edited ? document : null, "expire");
  const found = plans.data;
  if (found === undefined)
    return plans.error ? (
      <ErrorState error={plans.error} onRetry={() => void plans.refetch()} />
    ) : (
      <Loading what={`the plans of ${plural(runs.length, "run")}`} />
    );
  const stale = plans.isPlaceholderData || plans.error !== null;
  const governed = found.filter((plan) => plan.policy?.level !== "run");
  return (
    <section aria-labelledby="effect">
      <h2 id="effect">What stays and what goes</h2>
      {plans.error ? <ErrorState error={plans.error} /> : null}
      <div className={stale ? styles.stale : undefined} aria-busy={plans.isPlaceholderData}>
        <dl className={styles.figures}>
          <Figure name="Runs that it holds for">
            {formatCount(governed.length)}
            {found.length > governed.length && (
              <small className="quiet">{found.length - governed.length} have their own</small>
            )}
          </Figure>
          <Effect plans={governed} />
          <CostNow project={project} run={undefined} freedByStore={freedByStore(governed)} />
        </dl>
        {!isAll && (
          <p className="quiet">
            These are the newest {MOST_RUNS} runs. The policy holds for the older ones, too: choose one above to see its
            plan.
          </p>
        )}
      </div>
      <Apply {...props} plans={governed} stale={stale} />
      <div className={stale ? styles.stale : undefined}>
        <PlansByRun plans={found} />
      </div>
      {listed !== undefined && runs.includes(listed) && <Listed {...props} run={listed} />}
    </section>
  );
}

/** The checkpoints of one of the project's runs. */
function Listed({ project, run, document, edited }: EffectProps & { run: string }) {
  const plans = usePlans(project, [run], edited ? document : null, "all");
  return (
    <section aria-labelledby="listed">
      <h2 id="listed">Checkpoints of {run}</h2>
      <Reply of={plans} what="its checkpoints">
        {([plan]) => plan && <PlanTable plan={plan} />}
      </Reply>
    </section>
  );
}

function Effect({ plans }: { plans: readonly Schemas["RetentionPlan"][] }) {
  return (
    <>
      <Figure name="Stay">{formatCount(total(plans, (plan) => plan.kept))}</Figure>
      <Figure name="Go">{formatCount(total(plans, (plan) => plan.expired))}</Figure>
      <Figure name="Bytes freed">
        <Bytes count={total(plans, (plan) => plan.freed.bytes)} />
        <small className="quiet">of all stores, without what other checkpoints need</small>
      </Figure>
    </>
  );
}

function Notes({ notes }: { notes: readonly string[] }) {
  if (notes.length === 0) return null;
  return (
    <ul className={styles.said}>
      {notes.map((note) => (
        <li key={note}>{note}</li>
      ))}
    </ul>
  );
}

interface ApplyProps extends EffectProps {
  plans: readonly Schemas["RetentionPlan"][];
  /** The plans are not those of the document that is shown. */
  stale: boolean;
}

/** What was seen when the dialog was opened: exactly that is applied, whatever a live event brings meanwhile. */
interface Asked {
  document: PolicyDocument;
  plans: readonly Schemas["RetentionPlan"][];
  level: Level;
}

function Apply({ level, document, edited, plans, stale, onApplied }: ApplyProps) {
  const [asked, setAsked] = useState<Asked | null>(null);
  const count = total(plans, (plan) => plan.expired);
  if (!edited && count === 0) return null;
  const reason = stale ? "The plan of this policy is not there yet, or the service refuses the policy." : undefined;
  const going = asked === null ? 0 : total(asked.plans, (plan) => plan.expired);
  const name = level.run ?? level.project;
  return (
    <div className={styles.bar}>
      <Can scope="operate" reason={reason}>
        <button type="button" className="primary" onClick={() => setAsked({ document, plans, level })}>
          {edited
            ? count === 0
              ? "Save the policy"
              : `Save the policy and expire ${formatCount(count)}`
            : `Expire ${formatCount(count)} now`}
        </button>
      </Can>
      {!edited && (
        <span className="quiet">The service does so by itself, too, when its retention controller comes by.</span>
      )}
      {asked !== null && (
        <ConfirmDialog
          title={`Retention of ${name}`}
          action={going === 0 ? "Save" : `Expire ${formatCount(going)}`}
          {...(going === 0 ? {} : { typed: String(going) })}
          onConfirm={async () => onApplied(await applyPolicy(asked.level, asked.document, asked.plans))}
          onClose={() => setAsked(null)}
        >
          <p>
            The policy of {level.run === null ? `the project ${name}` : `the run ${name}`} will be{" "}
            <code>{rulesInWords(asked.document)}</code>, and the service goes on to expire by it.
          </p>
          {going > 0 && (
            <p>
              {plural(going, "checkpoint")} of {plural(asked.plans.filter((plan) => plan.expired > 0).length, "run")} go
              to the trash now. They can be taken back until they are purged; then{" "}
              {formatBytes(total(asked.plans, (plan) => plan.freed.bytes))} are freed.
            </p>
          )}
        </ConfirmDialog>
      )}
    </div>
  );
}

/** Without its own policy a run falls back to the project's, under which something may go. */
function DeletePolicy({ level, onDone }: { level: Level; onDone: (outcome: Outcome | null) => void }) {
  const queries = useQueryClient();
  const [effect, setEffect] = useState<{ plan: Schemas["RetentionPlan"] | null } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const { project, run } = level;

  async function ask() {
    setError(null);
    try {
      if (run === null) return setEffect({ plan: null });
      const policy = await queries.fetchQuery(policyQuery(project, undefined));
      setEffect({ plan: policy === null ? null : await planOf(project, run, policy.document, "none") });
    } catch (failure) {
      setError(failure);
    }
  }

  const going = effect?.plan?.expired ?? 0;
  return (
    <>
      <Can scope="operate">
        <button type="button" className="danger" onClick={() => void ask()}>
          Delete the policy
        </button>
      </Can>
      {error !== null && <ErrorState error={error} />}
      {effect !== null && (
        <ConfirmDialog
          title={`Delete the policy of ${run ?? project}`}
          action="Delete"
          {...(going === 0 ? {} : { typed: String(going) })}
          onConfirm={async () => {
            await deletePolicy(level);
            onDone(null);
          }}
          onClose={() => setEffect(null)}
        >
          <p>
            {effect.plan === null
              ? `Then ${run === null ? "no run expires anything, unless it has a policy of its own" : "nothing of the run expires any more: its project has no policy"}.`
              : `Then the project’s policy holds for the run: ${plural(going, "checkpoint")} of it would expire by that one, and ${formatBytes(effect.plan.freed.bytes)} be freed.`}
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}

function total<Item>(items: readonly Item[], of: (item: Item) => number): number {
  return items.reduce((sum, each) => sum + of(each), 0);
}
