import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import type { Schemas } from "@/api/client";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { useAllRuns } from "@/components/choose/allRuns";
import { Figure, Figures } from "@/components/facts/Figures";
import { EmptyState, ErrorState, Loading, Reply } from "@/components/states";
import { Bytes } from "@/components/values";
import { formatBytes, formatCount, plural } from "@/format/numbers";
import { applyPolicy, deletePolicy, type Level, type Outcome, planOf, type Seen } from "./actions";
import { CostLater, CostNow, CostPrices } from "./CostChange";
import { freedByStore } from "./cost";
import { Done } from "./Done";
import { PlansByRun } from "./PlansByRun";
import { PlanTable } from "./PlanTable";
import { PolicyEditor } from "./PolicyEditor";
import { BEHIND, Behind } from "./policies/Behind";
import { editionOf, ownPolicy, useDraft, usePolicyConflict } from "./policies/editing";
import { WhereFrom } from "./policies/WhereFrom";
import styles from "./Retention.module.css";
import { type PolicyDocument, rulesInWords } from "./rules";
import { policyQuery, usePlan, usePlans, useRetentionSearch } from "./useRetention";

/** A policy is edited, and what is kept and expires under it is seen at once; then it is applied. */
export function PolicyTab({ project, run }: { project: string; run: string | undefined }) {
  const policy = useQuery(policyQuery(project, run));
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  return (
    <>
      {outcome !== null && <Done outcome={outcome} onChange={setOutcome} />}
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
  const draft = useDraft(found);
  const { document: shown, edited } = draft;
  const own = ownPolicy(found, run);
  const level: Level = { kind: "retention", project, run: run ?? null, own };
  const shared = {
    project,
    level,
    inForce: found,
    document: shown,
    edited,
    isBehind: draft.isBehind,
    onApplied: applied,
    onReload: draft.rebase,
  };

  return (
    <>
      <p>
        <WhereFrom what="retention policy" run={run} found={found} words={rulesInWords} />
      </p>
      <Behind of={draft} found={found} />
      <PolicyEditor key={draft.edition} initial={shown} onChange={draft.edit} />
      <div className={styles.bar}>
        <span role="status">
          {edited ? "Edited, and not saved." : found === null ? "Nothing is edited yet." : "As it is in force."}
        </span>
        {edited && (
          <button type="button" onClick={draft.discard}>
            Discard the edit
          </button>
        )}
        {own !== null && !edited && <DeletePolicy level={level} onDone={onOutcome} />}
      </div>
      {found === null && !edited ? (
        <EmptyState title="Without a policy nothing ever expires">
          <p>
            Give a rule above, for example 5 of the newest, and see what would expire. Nothing is done before you apply
            it.
          </p>
        </EmptyState>
      ) : run === undefined ? (
        <OfProject {...shared} />
      ) : (
        <OfRun {...shared} run={run} />
      )}
    </>
  );

  function applied(what: Outcome, seen: Seen) {
    onOutcome(what);
    if (what.isSaved) draft.saved(seen.document);
  }
}

interface EffectProps {
  project: string;
  level: Level;
  /** null: no policy is in force. */
  inForce: Schemas["PolicyView"] | null;
  document: PolicyDocument;
  edited: boolean;
  /** Another person has changed the policy since the edit was begun. */
  isBehind: boolean;
  onApplied: (outcome: Outcome, seen: Seen) => void;
  /** Another person's version was seen. */
  onReload: (seen: Schemas["PolicyView"] | null) => void;
}

function askedOf({ project, inForce, document, edited }: EffectProps) {
  return {
    project,
    policy: edited ? document : null,
    edition: editionOf(inForce),
  };
}

function OfRun({ run, ...props }: EffectProps & { run: string }) {
  const { project, document, edited } = props;
  const found = usePlan(askedOf(props), run);
  const plan = found.data;
  if (plan === undefined)
    return found.error ? (
      <ErrorState error={found.error} onRetry={() => void found.refetch()} />
    ) : (
      <Loading what="what is kept and what expires" />
    );
  const stale = found.isPlaceholderData || found.error !== null;
  return (
    <section aria-labelledby="effect">
      <h2 id="effect">What is kept and what expires</h2>
      {found.error ? <ErrorState error={found.error} onRetry={() => void found.refetch()} /> : null}
      <div className={stale ? styles.stale : undefined} aria-busy={found.isPlaceholderData}>
        <Figures>
          <Effect plans={[plan]} />
          <CostNow project={project} run={run} freedByStore={freedByStore([plan])} />
          <CostLater project={project} run={run} draft={document} edited={edited && !found.error} />
        </Figures>
        <CostPrices project={project} run={run} />
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
  const runs = useAllRuns(props.project);
  return (
    <Reply of={runs} what="the runs">
      {(found) =>
        found.length === 0 ? (
          <>
            <EmptyState title="No run is here yet">
              <p>The policy can be saved now; it then holds for each run that comes.</p>
            </EmptyState>
            <Apply {...props} plans={[]} stale={false} />
          </>
        ) : (
          <OfRuns {...props} runs={found.map((each) => each.name)} />
        )
      }
    </Reply>
  );
}

/** All runs of the project: the policy expires checkpoints of the oldest as well as of the newest. */
function OfRuns({ runs, ...props }: EffectProps & { runs: string[] }) {
  const { project } = props;
  const { listed } = useRetentionSearch();
  const { plans, planned } = usePlans(askedOf(props), runs);
  const found = plans.data;
  const failed = plans.error ? (
    <>
      <p>
        What expires in the whole project is not known, because the plan of a run could not be made. Nothing can be
        applied until it is known.
      </p>
      <ErrorState error={plans.error} onRetry={() => void plans.refetch()} />
    </>
  ) : null;
  const progress = `the plans: ${formatCount(planned)} of ${plural(runs.length, "run")}`;
  if (found === undefined) return failed ?? <Loading what={progress} />;
  const stale = plans.isPlaceholderData || plans.error !== null;
  const governed = found.filter((plan) => plan.policy?.level !== "run");
  return (
    <section aria-labelledby="effect">
      <h2 id="effect">What is kept and what expires</h2>
      {failed}
      {plans.isPlaceholderData && !plans.error && <Loading what={progress} />}
      <div className={stale ? styles.stale : undefined} aria-busy={plans.isPlaceholderData}>
        <Figures>
          <Figure name="Runs that it holds for">
            {formatCount(governed.length)}
            {found.length > governed.length && (
              <small className="quiet">{found.length - governed.length} have their own</small>
            )}
          </Figure>
          <Effect plans={governed} />
          <CostNow project={project} run={undefined} freedByStore={freedByStore(governed)} />
        </Figures>
        <CostPrices project={project} run={undefined} />
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
function Listed({ run, ...props }: EffectProps & { run: string }) {
  const plan = usePlan(askedOf(props), run);
  return (
    <section aria-labelledby="listed">
      <h2 id="listed">Checkpoints of {run}</h2>
      <Reply of={plan} what="its checkpoints">
        {(found) => <PlanTable plan={found} />}
      </Reply>
    </section>
  );
}

function Effect({ plans }: { plans: readonly Schemas["RetentionPlan"][] }) {
  return (
    <>
      <Figure name="Kept">{formatCount(total(plans, (plan) => plan.kept))}</Figure>
      <Figure name="Expire">{formatCount(total(plans, (plan) => plan.expired))}</Figure>
      <Figure name="Bytes freed">
        <Bytes count={total(plans, (plan) => plan.freed.bytes)} />
        <small className="quiet">
          of all stores, without what other checkpoints need
          {/* Each plan takes what the other runs need as staying. */}
          {plans.length > 1 && "; what only these runs share is freed, too, and not counted"}
        </small>
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
  /** The plans are not those of the document that is shown, or not all are there. */
  stale: boolean;
}

function Apply(props: ApplyProps) {
  const { project, level, document, edited, isBehind, plans, stale, onApplied, onReload } = props;
  // What was seen when the dialog was opened: exactly that is applied, whatever a live event brings meanwhile.
  const [asked, setAsked] = useState<Seen | null>(null);
  const conflict = usePolicyConflict(asked?.level ?? level, (seen) => {
    setAsked(null);
    onReload(seen);
  });
  const count = total(plans, (plan) => plan.expired);
  if (!edited && count === 0 && asked === null) return null;
  const unplanned = stale ? "The plan of this policy is not there yet, or the service cannot make it." : undefined;
  const reason = isBehind ? BEHIND : unplanned;
  const expiring = asked === null ? 0 : total(asked.plans, (plan) => plan.expired);
  const name = level.run === null ? `the project ${project}` : `the run ${level.run}`;
  const planned = asked?.plans[0]?.policy;
  const figure = stale ? "" : ` ${formatCount(count)}`;
  const save = count === 0 && !stale ? "Save the policy" : `Save the policy and expire${figure}`;
  const action = edited ? save : `Expire${figure} now`;
  return (
    <div className={styles.bar}>
      <Can scope="operate" reason={reason}>
        <button type="button" className="primary" onClick={() => setAsked({ level, document, edited, plans })}>
          {action}
        </button>
      </Can>
      {!edited && (
        <span className="quiet">The service does so by itself, too, when its retention controller comes by.</span>
      )}
      {asked !== null && (
        <ConfirmDialog
          title={`Retention of ${level.run ?? project}`}
          action={expiring === 0 ? "Save" : `Expire ${formatCount(expiring)}`}
          {...(expiring === 0 ? {} : { typed: String(expiring) })}
          onConfirm={async () => onApplied(await applyPolicy(asked), asked)}
          onConflict={conflict}
          onClose={() => setAsked(null)}
        >
          {asked.edited ? (
            <p>
              The policy of {name} will be <code>{rulesInWords(asked.document)}</code>, and the service goes on to
              expire by it{level.run === null && ", in every run that has no policy of its own, old or to come"}.
            </p>
          ) : (
            <p>
              {planned?.level === "run" ? "The run’s policy" : "The project’s policy"} stays as it is:{" "}
              <code>{rulesInWords(planned?.document ?? {})}</code>.
            </p>
          )}
          {expiring > 0 && (
            <p>
              {plural(expiring, "checkpoint")} of {plural(asked.plans.filter((plan) => plan.expired > 0).length, "run")}{" "}
              {expiring === 1 ? "goes" : "go"} to the trash now. They can be taken back until they are purged; then{" "}
              {asked.plans.length > 1 && "at least "}
              {formatBytes(total(asked.plans, (plan) => plan.freed.bytes))} are freed.
            </p>
          )}
        </ConfirmDialog>
      )}
    </div>
  );
}

/** Without its own policy a run falls back to the project's, under which something may expire. */
function DeletePolicy({ level, onDone }: { level: Level; onDone: (outcome: Outcome | null) => void }) {
  const queries = useQueryClient();
  // `seen`: the version that stood there when it was asked for.
  const [effect, setEffect] = useState<{ plan: Schemas["RetentionPlan"] | null; seen: Level } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const { project, run } = level;
  const conflict = usePolicyConflict(effect?.seen ?? level, () => setEffect(null));

  async function ask() {
    setError(null);
    try {
      const policy = run === null ? null : await queries.fetchQuery(policyQuery(project, undefined));
      const plan = run === null || policy === null ? null : await planOf(project, run, policy.document, "none");
      setEffect({ plan, seen: level });
    } catch (failure) {
      setError(failure);
    }
  }

  const expiring = effect?.plan?.expired ?? 0;
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
          {...(expiring === 0 ? {} : { typed: String(expiring) })}
          onConfirm={async () => {
            await deletePolicy(effect.seen);
            onDone(null);
          }}
          onConflict={conflict}
          onClose={() => setEffect(null)}
        >
          <p>
            {effect.plan === null
              ? `Then ${run === null ? "no run expires anything, unless it has a policy of its own" : "nothing of the run expires any more: its project has no policy"}.`
              : `Then the project’s policy holds for the run: ${plural(expiring, "checkpoint")} of it would expire by that one, and ${formatBytes(effect.plan.freed.bytes)} be freed.`}
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}

function total<Item>(items: readonly Item[], of: (item: Item) => number): number {
  return items.reduce((sum, each) => sum + of(each), 0);
}
