import { type ReactNode, useMemo, useState } from "react";
import { type Schemas, useQuery } from "@/api/client";
import { useSession } from "@/api/session";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { useAllRuns } from "@/components/choose/allRuns";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Figure, Figures } from "@/components/facts/Figures";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { formatBytes, formatCount, plural } from "@/format/numbers";
import { type Outcome, pruneShown, type Wanted } from "../actions";
import { CostNow, CostPrices } from "../CostChange";
import { Done } from "../Done";
import { Reasons } from "../PlanTable";
import styles from "../Retention.module.css";
import { useRetentionSearch } from "../useRetention";
import { FilterForm } from "./FilterForm";
import { PruneRuns } from "./PruneRuns";
import { filterInWords } from "./pruneFilter";
import { matching } from "./runFilter";

const PRUNE = "/v1/projects/{project}/runs/{run}/retention/prune";
/** The API counts the bytes of so many chosen ones, at most. */
const MOST_COUNTED = 2000;

/** Checkpoints of one run, or of several, go to the trash by a filter and by choosing among what it finds. */
export function PruneTab({ project, run }: { project: string; run: string | undefined }) {
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  return (
    <>
      {outcome !== null && <Done outcome={outcome} onChange={setOutcome} />}
      {run === undefined ? (
        <OfProject project={project} onDone={setOutcome} />
      ) : (
        <OfRun project={project} run={run} onDone={setOutcome} />
      )}
    </>
  );
}

function OfProject({ project, onDone }: { project: string; onDone: (outcome: Outcome) => void }) {
  const { filter, allOfRun = false, runs = {} } = useRetentionSearch();
  const all = useAllRuns(project);
  return (
    <Reply of={all} what="the runs">
      {(found) =>
        found.length === 0 ? (
          <EmptyState title="No run is here yet">
            <p>A training script makes its run when it opens the checkpointer for the first time.</p>
          </EmptyState>
        ) : (
          <>
            <FilterForm key={JSON.stringify([filter, allOfRun, runs])} ofRuns />
            <WhenAsked filter={filter} every="every checkpoint of every run">
              {(wanted) => (
                <PruneRuns
                  key={JSON.stringify([wanted, allOfRun, runs])}
                  wanted={{ project, filter: wanted, allOfRun }}
                  runs={matching(found, runs)}
                  onDone={onDone}
                />
              )}
            </WhenAsked>
          </>
        )
      }
    </Reply>
  );
}

function OfRun({ project, run, onDone }: { project: string; run: string; onDone: (outcome: Outcome) => void }) {
  const { filter, allOfRun = false } = useRetentionSearch();
  return (
    <>
      <FilterForm key={JSON.stringify([filter, allOfRun])} />
      <WhenAsked filter={filter} every="every checkpoint of the run">
        {(wanted) => (
          <DryRun
            key={JSON.stringify([wanted, allOfRun])}
            prune={{ project, run, filter: wanted, allOfRun }}
            onDone={onDone}
          />
        )}
      </WhenAsked>
    </>
  );
}

interface WhenAskedProps {
  filter: Schemas["PruneFilter"] | undefined;
  /** What matches without a condition. */
  every: string;
  children: (filter: Schemas["PruneFilter"]) => ReactNode;
}

/** A dry run is made once a filter was given, and by a token that may prune. */
function WhenAsked({ filter, every, children }: WhenAskedProps) {
  const { scopes } = useSession();
  if (!scopes.includes("operate"))
    return (
      <EmptyState title="This token cannot prune">
        <p>Even the dry run needs the scope “operate”. Sign in with a token that has it.</p>
      </EmptyState>
    );
  if (filter === undefined)
    return (
      <EmptyState title="Say what to look for">
        <p>With no condition {every} matches. Nothing is done before you confirm it.</p>
      </EmptyState>
    );
  return children(filter);
}

type Prune = Wanted & { run: string };

function DryRun({ prune, onDone }: { prune: Prune; onDone: (outcome: Outcome) => void }) {
  const { project, run, filter, allOfRun } = prune;
  const found = useQuery("post", PRUNE, {
    params: { path: { project, run } },
    body: { filter, all_of_run: allOfRun, dry_run: true, reason: "" },
  });
  return (
    <Reply of={found} what="what matches">
      {(pruned) =>
        pruned.trashed.length + pruned.left.length === 0 ? (
          <EmptyState title="Nothing matches">
            <p>Take a condition out, or choose another run.</p>
          </EmptyState>
        ) : (
          <Found prune={prune} pruned={pruned} onDone={onDone} />
        )
      }
    </Reply>
  );
}

const pruned = createColumnHelper<Schemas["PrunedCheckpoint"]>();
const EXPIRING: Columns<Schemas["PrunedCheckpoint"]> = [
  pruned.accessor("step", {
    header: "Step",
    size: 100,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  pruned.accessor("attempt", { header: "Attempt", size: 80, meta: { align: "right" } }),
  pruned.accessor("health", {
    header: "Health",
    size: 120,
    cell: ({ getValue }) => <StateBadge state={getValue()} tone={getValue() === "ok" ? "good" : undefined} />,
  }),
  pruned.accessor("logical_bytes", {
    header: "State",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
];

const left = createColumnHelper<Schemas["LeftCheckpoint"]>();
const KEPT: Columns<Schemas["LeftCheckpoint"]> = [
  left.accessor("step", {
    header: "Step",
    size: 90,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  left.accessor("attempt", { header: "Attempt", size: 80, meta: { align: "right", phone: false } }),
  left.accessor("reasons", {
    header: "Why it is kept",
    size: 480,
    cell: ({ getValue }) => <Reasons reasons={getValue()} />,
  }),
];

interface FoundProps {
  prune: Prune;
  pruned: Schemas["Pruned"];
  onDone: (outcome: Outcome) => void;
}

function Found({ prune, pruned, onDone }: FoundProps) {
  // What matches later than the first look is not chosen unseen.
  const [chosen, setChosen] = useState<ReadonlySet<string>>(
    () => new Set(pruned.trashed.map((each) => each.checkpoint_id)),
  );
  const [asked, setAsked] = useState<readonly string[] | null>(null);
  const [reason, setReason] = useState("");
  const expiring = useMemo(() => allRows(pruned.trashed), [pruned.trashed]);
  const kept = useMemo(() => allRows(pruned.left), [pruned.left]);
  const ids = useMemo(
    () => pruned.trashed.map((each) => each.checkpoint_id).filter((id) => chosen.has(id)),
    [pruned.trashed, chosen],
  );
  const freed = useFreed(prune, pruned, ids);

  return (
    <>
      <section aria-labelledby="expiring">
        <h2 id="expiring">What would expire</h2>
        <Figures>
          <Figure name="Chosen">
            {formatCount(ids.length)} of {formatCount(pruned.trashed.length)}
          </Figure>
          <Figure name="Bytes freed">
            {freed !== undefined ? (
              <Bytes count={freed.bytes} />
            ) : ids.length > MOST_COUNTED ? (
              <small className="quiet">counted for all, or for {formatCount(MOST_COUNTED)} chosen ones at most</small>
            ) : (
              "…"
            )}
            <small className="quiet">
              of all stores, without what other checkpoints need
              {pruned.purge_at !== null && (
                <>
                  ; by the collection after their purge, on <Time at={pruned.purge_at} />
                </>
              )}
            </small>
          </Figure>
          <CostNow
            project={prune.project}
            run={prune.run}
            freedByStore={freed === undefined ? undefined : (freed.by_store ?? {})}
          />
        </Figures>
        <CostPrices project={prune.project} run={prune.run} />
        <div className={styles.bar}>
          <Can scope="operate" reason={ids.length === 0 ? "Nothing is chosen." : undefined}>
            <button type="button" className="primary" onClick={() => setAsked(ids)}>
              Move {formatCount(ids.length)} to the trash
            </button>
          </Can>
        </div>
        <DataTable
          label="Checkpoints that would expire"
          columns={EXPIRING}
          pages={expiring}
          rowKey={(row) => row.checkpoint_id}
          selected={chosen}
          onSelect={setChosen}
          empty={
            <EmptyState title="Nothing may expire">
              <p>All that matches must be kept. The reasons are below.</p>
            </EmptyState>
          }
        />
      </section>
      {pruned.left.length > 0 && (
        <section aria-labelledby="kept">
          <h2 id="kept">What matches and is kept</h2>
          <DataTable
            label="Checkpoints that are kept"
            columns={KEPT}
            pages={kept}
            rowKey={(row) => row.checkpoint_id}
            empty={null}
          />
        </section>
      )}
      {asked !== null && (
        <ConfirmDialog
          title={`Prune ${prune.run}`}
          action={`Move ${formatCount(asked.length)} to the trash`}
          typed={String(asked.length)}
          onConfirm={async () => onDone(await pruneShown(prune, [{ run: prune.run, ids: asked }], reason.trim()))}
          onClose={() => setAsked(null)}
        >
          <p>
            {plural(asked.length, "checkpoint")} of {prune.project}/{prune.run} {asked.length === 1 ? "goes" : "go"} to
            the trash. They can be taken back until{" "}
            {pruned.purge_at === null ? "their purge" : <Time at={pruned.purge_at} />}
            {freed === undefined ? "." : `; then the next collection frees ${formatBytes(freed.bytes)}.`}
          </p>
          <p>Filter: {filterInWords(prune.filter)}.</p>
          {prune.allOfRun && <p>Those that the run could be resumed from may be among them.</p>}
          <label className={styles.field}>
            <span>Why (for readers of the audit events)</span>
            <input value={reason} maxLength={1000} onChange={(event) => setReason(event.target.value)} />
          </label>
        </ConfirmDialog>
      )}
    </>
  );
}

/** The bytes of what is chosen: sharing makes them another sum than that of its parts. undefined: not counted. */
function useFreed(prune: Prune, pruned: Schemas["Pruned"], ids: readonly string[]): Schemas["FreedBytes"] | undefined {
  const { project, run, filter, allOfRun } = prune;
  const isAll = ids.length === pruned.trashed.length;
  const isCounted = !isAll && ids.length > 0 && ids.length <= MOST_COUNTED;
  const { data } = useQuery(
    "post",
    PRUNE,
    {
      params: { path: { project, run } },
      body: { filter, all_of_run: allOfRun, dry_run: true, reason: "", checkpoint_ids: [...ids] },
    },
    // Of an earlier choice no figure is shown: it would be another sum.
    { enabled: isCounted },
  );
  if (isAll) return pruned.freed;
  if (ids.length === 0) return { bytes: 0, by_store: {} };
  return isCounted ? data?.freed : undefined;
}
