import { type FormEvent, useMemo, useState } from "react";
import { type Schemas, useQuery } from "@/api/client";
import { useSession } from "@/api/session";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Figure, Figures } from "@/components/facts/Figures";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { formatBytes, formatCount, plural } from "@/format/numbers";
import { type Outcome, type Prune, pruneShown } from "../actions";
import { CostNow, CostPrices } from "../CostChange";
import { Done } from "../Done";
import { Reasons } from "../PlanTable";
import styles from "../Retention.module.css";
import { useChangeSearch, useRetentionSearch } from "../useRetention";
import { ChooseRun } from "./ChooseRun";
import { fieldsOfFilter, filterOf, HEALTHS } from "./pruneFilter";

const PRUNE = "/v1/projects/{project}/runs/{run}/retention/prune";
/** The API counts the bytes of so many chosen ones, at most. */
const MOST_COUNTED = 2000;

/** Checkpoints go to the trash by a filter and by choosing among what it finds. */
export function PruneTab({ project, run }: { project: string; run: string | undefined }) {
  const { filter, allOfRun = false } = useRetentionSearch();
  const { scopes } = useSession();
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  if (run === undefined) return <ChooseRun project={project} why="Checkpoints are pruned run by run." />;
  return (
    <>
      {outcome !== null && <Done outcome={outcome} onChange={setOutcome} />}
      <FilterForm key={JSON.stringify(filter)} />
      {!scopes.includes("operate") ? (
        <EmptyState title="This token cannot prune">
          <p>Even the dry run needs the scope “operate”. Sign in with a token that has it.</p>
        </EmptyState>
      ) : filter === undefined ? (
        <EmptyState title="Say what to look for">
          <p>With no condition every checkpoint of the run matches. Nothing is done before you confirm it.</p>
        </EmptyState>
      ) : (
        <DryRun
          key={JSON.stringify([filter, allOfRun])}
          prune={{ project, run, filter, allOfRun }}
          onDone={setOutcome}
        />
      )}
    </>
  );
}

function FilterForm() {
  const { filter, allOfRun } = useRetentionSearch();
  const change = useChangeSearch();
  const [fields, setFields] = useState(() => fieldsOfFilter(filter ?? {}));
  const [all, setAll] = useState(allOfRun ?? false);
  const [wrong, setWrong] = useState("");

  function look(event: FormEvent) {
    event.preventDefault();
    const found = filterOf(fields);
    setWrong(typeof found === "string" ? found : "");
    if (typeof found !== "string") change({ filter: found, allOfRun: all || undefined });
  }

  function text(name: "fromStep" | "beforeStep" | "attempt" | "olderThan" | "labels", label: string, example: string) {
    return (
      <label className={styles.field}>
        <span>{label}</span>
        <input
          value={fields[name]}
          placeholder={example && `for example ${example}`}
          autoComplete="off"
          onChange={(event) => setFields({ ...fields, [name]: event.target.value })}
        />
      </label>
    );
  }

  return (
    <form className="panel" onSubmit={look} aria-label="Which checkpoints">
      <div className={styles.fields}>
        {text("fromStep", "From step", "0")}
        {text("beforeStep", "Before step", "5000")}
        {text("attempt", "Attempt", "2")}
        {text("olderThan", "Committed longer ago than", "7d")}
        {text("labels", "With one of these labels", "debug, spike")}
      </div>
      <fieldset className={styles.checks}>
        <legend className="quiet">Health (none chosen: any)</legend>
        {HEALTHS.map((each) => (
          <label key={each}>
            <input
              type="checkbox"
              checked={fields.health.includes(each)}
              onChange={(event) =>
                setFields({
                  ...fields,
                  health: HEALTHS.filter((one) => (one === each ? event.target.checked : fields.health.includes(one))),
                })
              }
            />{" "}
            {each}
          </label>
        ))}
      </fieldset>
      <p>
        <label>
          <input type="checkbox" checked={all} onChange={(event) => setAll(event.target.checked)} /> Also the last
          points that the run could be resumed from (only of a run without an active attempt)
        </label>
      </p>
      {wrong !== "" && <p role="alert">{wrong}</p>}
      <div className="row">
        <button type="submit">Show what matches</button>
        {filter !== undefined && (
          <button type="button" onClick={() => change({ filter: undefined, allOfRun: undefined })}>
            Clear
          </button>
        )}
      </div>
    </form>
  );
}

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
          onConfirm={async () => onDone(await pruneShown(prune, asked, reason.trim()))}
          onClose={() => setAsked(null)}
        >
          <p>
            {plural(asked.length, "checkpoint")} of {prune.project}/{prune.run} {asked.length === 1 ? "goes" : "go"} to
            the trash. They can be taken back until{" "}
            {pruned.purge_at === null ? "their purge" : <Time at={pruned.purge_at} />}
            {freed === undefined ? "." : `; then the next collection frees ${formatBytes(freed.bytes)}.`}
          </p>
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
