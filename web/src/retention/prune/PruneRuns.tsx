import { queryOptions, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { type ReactNode, useMemo, useState } from "react";
import { api, queryClient, type Schemas } from "@/api/client";
import { failureOf, ProblemError } from "@/api/problem";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Figure, Figures } from "@/components/facts/Figures";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState, Loading } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { formatBytes, formatCount, plural } from "@/format/numbers";
import { RunName } from "@/runs/RunName";
import { eachOf, isOfAll, type OnPart, type Outcome, type Part, pruneShown, type Wanted } from "../actions";
import { CostNow, CostPrices } from "../CostChange";
import { freedByStore } from "../cost";
import { Reasons } from "../PlanTable";
import styles from "../Retention.module.css";
import { retry } from "../useRetention";
import { filterInWords } from "./pruneFilter";

const PRUNE = "/v1/projects/{project}/runs/{run}/retention/prune";
const SHOWN = 20;

interface DryRun {
  run: string;
  pruned: Schemas["Pruned"];
}

/** A run of which the service made no dry run, and why. */
interface Failed {
  run: string;
  error: unknown;
}

/** Asked again within this time, the service is not asked for what it has said already: of 1,000 runs one call may fail. */
const DRY_RUN_HOLDS_MS = 60_000;

function dryRunQuery({ project, filter, allOfRun }: Wanted, run: string) {
  const asked = {
    params: { path: { project, run } },
    body: { filter, all_of_run: allOfRun, dry_run: true, reason: "" },
  };
  return queryOptions({
    queryKey: ["post", PRUNE, asked],
    queryFn: async ({ signal }) => (await api.POST(PRUNE, { ...asked, signal })).data as Schemas["Pruned"],
    retry,
  });
}

/** The dry runs of all these runs: one that fails takes nothing from the others. `done`: how many are over so far. */
function useDryRuns(wanted: Wanted, runs: readonly string[]) {
  const { project, filter, allOfRun } = wanted;
  const [done, setDone] = useState(0);

  async function dryRun(run: string): Promise<DryRun | Failed | null> {
    try {
      const asked = { ...dryRunQuery(wanted, run), staleTime: DRY_RUN_HOLDS_MS };
      return { run, pruned: await queryClient.fetchQuery(asked) };
    } catch (error) {
      if (isOfAll(error)) throw error;
      // Deleted meanwhile.
      if (error instanceof ProblemError && error.problem.code === "run_not_found") return null;
      return { run, error };
    }
  }

  const found = useQuery({
    queryKey: ["post", PRUNE, { params: { path: { project } }, body: { runs, filter, allOfRun } }],
    queryFn: async ({ signal }) => {
      setDone(0);
      const all = await eachOf(runs, dryRun, { signal, onDone: setDone });
      return {
        made: all.filter((each) => each !== null && "pruned" in each),
        failed: all.filter((each) => each !== null && "error" in each),
      };
    },
    // It is a call for each run.
    refetchOnWindowFocus: false,
  });
  return { found, done };
}

interface PruneRunsProps {
  wanted: Wanted;
  /** The names of those that are looked into. */
  runs: readonly string[];
  onDone: (outcome: Outcome) => void;
}

/** One dry run over many runs, and what is chosen of it goes to the trash, run by run. */
export function PruneRuns({ wanted, runs, onDone }: PruneRunsProps) {
  // A run that comes, or changes its status, later than the first look is not taken unseen.
  const [asked] = useState(runs);
  const { found, done } = useDryRuns(wanted, asked);
  if (asked.length === 0)
    return (
      <EmptyState title="No run matches">
        <p>Take a condition on the runs out.</p>
      </EmptyState>
    );
  if (found.data === undefined)
    return found.error ? (
      <ErrorState error={found.error} onRetry={() => void found.refetch()} />
    ) : (
      <Loading what={`the dry runs: ${formatCount(done)} of ${plural(asked.length, "run")}`} />
    );
  const { made, failed } = found.data;
  return (
    <>
      {failed.length > 0 && <NotAsked failed={failed} onRetry={() => void found.refetch()} />}
      <Matches wanted={wanted} made={made} stale={found.isFetching} onDone={onDone} />
    </>
  );
}

function NotAsked({ failed, onRetry }: { failed: readonly Failed[]; onRetry: () => void }) {
  return (
    <div role="alert">
      <p>Of {plural(failed.length, "run")} the service made no dry run. Nothing of them is in what follows:</p>
      <ul className={styles.said}>
        {failed.slice(0, SHOWN).map(({ run, error }) => (
          <li key={run}>
            {run}: {failureOf(error).detail}
          </li>
        ))}
        {failed.length > SHOWN && <li>and {plural(failed.length - SHOWN, "other")}</li>}
      </ul>
      <button type="button" onClick={onRetry}>
        Look again
      </button>
    </div>
  );
}

const run = createColumnHelper<DryRun & { project: string }>();
const RUNS: Columns<DryRun & { project: string }> = [
  run.accessor("run", {
    header: "Run",
    // A phone has room for all that it shows, with the link at the end.
    size: 150,
    cell: ({ row: { original } }) => <RunName project={original.project} run={original.run} />,
  }),
  run.accessor((row) => row.pruned.trashed.length, {
    id: "expire",
    header: "Expire",
    size: 80,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  run.accessor((row) => row.pruned.left.length, {
    id: "kept",
    header: "Kept",
    size: 80,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  run.accessor((row) => row.pruned.freed.bytes, {
    id: "freed",
    header: "Bytes freed",
    size: 110,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  run.display({
    id: "choose",
    header: "",
    size: 85,
    cell: ({ row: { original } }) => (
      <Link
        from="/retention"
        to="/retention"
        search={(old) => ({ ...old, run: original.run, runs: undefined })}
        aria-label={`Choose among the checkpoints of ${original.run}`}
      >
        Choose
      </Link>
    ),
  }),
];

type Going = Schemas["PrunedCheckpoint"] & { run: string; why: string };

const going = createColumnHelper<Going>();
const GOING: Columns<Going> = [
  going.accessor("run", { header: "Run", size: 160 }),
  going.accessor("step", {
    header: "Step",
    size: 90,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  going.accessor("attempt", { header: "Attempt", size: 90, meta: { align: "right", phone: false } }),
  going.accessor("why", {
    header: "Why it goes",
    size: 220,
    meta: { phone: false },
    cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
  }),
  going.accessor("health", {
    header: "Health",
    size: 105,
    cell: ({ getValue }) => <StateBadge state={getValue()} tone={getValue() === "ok" ? "good" : undefined} />,
  }),
  going.accessor("logical_bytes", {
    header: "State",
    size: 95,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
];

type Kept = Schemas["LeftCheckpoint"] & { run: string };

const kept = createColumnHelper<Kept>();
const KEPT: Columns<Kept> = [
  kept.accessor("run", { header: "Run", size: 140 }),
  kept.accessor("step", {
    header: "Step",
    size: 90,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  kept.accessor("attempt", { header: "Attempt", size: 90, meta: { align: "right", phone: false } }),
  kept.accessor("reasons", {
    header: "Why it is kept",
    size: 360,
    cell: ({ getValue }) => <Reasons reasons={getValue()} />,
  }),
];

/** What was chosen when the dialog was opened: exactly that is asked for, whatever comes meanwhile. */
interface Asked {
  parts: Part[];
  count: number;
  freed: string;
  purgeAt: string | null;
}

interface MatchesProps {
  wanted: Wanted;
  made: readonly DryRun[];
  /** The dry run is being made anew. */
  stale: boolean;
  onDone: (outcome: Outcome) => void;
}

function Matches({ wanted, made, stale, onDone }: MatchesProps) {
  const { project, filter } = wanted;
  const runs = useMemo(
    () =>
      made
        .filter(({ pruned }) => pruned.trashed.length > 0)
        .map((each) => ({ ...each, project }))
        .sort((one, other) => other.pruned.freed.bytes - one.pruned.freed.bytes),
    [made, project],
  );
  const [chosen, setChosen] = useState<ReadonlySet<string>>(() => new Set(runs.map((each) => each.run)));
  const [asked, setAsked] = useState<Asked | null>(null);
  const taken = useMemo(() => runs.filter((each) => chosen.has(each.run)), [runs, chosen]);
  const why = filterInWords(filter);
  const expiring = useMemo(
    () => allRows(taken.flatMap(({ run, pruned }) => pruned.trashed.map((each) => ({ ...each, run, why })))),
    [taken, why],
  );
  const left = useMemo(
    () => allRows(made.flatMap(({ run, pruned }) => pruned.left.map((each) => ({ ...each, run })))),
    [made],
  );
  const ofRuns = useMemo(() => allRows(runs), [runs]);
  const count = expiring.items.length;
  const bytes = taken.reduce((sum, each) => sum + each.pruned.freed.bytes, 0);
  // Each dry run takes what the other runs need as staying: what only these runs share is in none of the figures.
  const isLeast = taken.length > 1;

  if (runs.length + left.items.length === 0)
    return (
      <EmptyState title="Nothing matches">
        <p>Take a condition out, or choose other runs.</p>
      </EmptyState>
    );
  const reason = stale ? "The dry run is being made anew." : count === 0 ? "Nothing is chosen." : undefined;
  return (
    <>
      <div className={stale ? styles.stale : undefined} aria-busy={stale}>
        <section aria-labelledby="expiring">
          <h2 id="expiring">What would expire</h2>
          <Figures>
            <Figure name="Runs chosen">
              {formatCount(taken.length)} of {formatCount(runs.length)}
            </Figure>
            <Figure name="Checkpoints">{formatCount(count)}</Figure>
            <Figure name={isLeast ? "Bytes freed, at least" : "Bytes freed"}>
              <Bytes count={bytes} />
              <small className="quiet">
                of all stores, without what other checkpoints need
                {isLeast && "; what only these runs share is freed, too, and not counted"}
              </small>
            </Figure>
            <CostNow project={project} run={undefined} freedByStore={freedByStore(taken.map((each) => each.pruned))} />
          </Figures>
          <CostPrices project={project} run={undefined} />
          <div className={styles.bar}>
            <Can scope="operate" reason={reason}>
              <button
                type="button"
                className="primary"
                onClick={() =>
                  setAsked({
                    parts: taken.map(({ run, pruned }) => ({
                      run,
                      ids: pruned.trashed.map((each) => each.checkpoint_id),
                    })),
                    count,
                    freed: `${isLeast ? "at least " : ""}${formatBytes(bytes)}`,
                    purgeAt: taken.map((each) => each.pruned.purge_at).sort()[0] ?? null,
                  })
                }
              >
                Move {formatCount(count)} to the trash
              </button>
            </Can>
          </div>
          <DataTable
            label="Runs that have what would expire"
            columns={RUNS}
            pages={ofRuns}
            rowKey={(row) => row.run}
            selected={chosen}
            onSelect={setChosen}
            empty={
              <EmptyState title="Nothing may expire">
                <p>All that matches must be kept. The reasons are below.</p>
              </EmptyState>
            }
          />
          {count > 0 && (
            <>
              <h3>Checkpoints of the chosen runs</h3>
              <DataTable
                label="Checkpoints that would expire"
                columns={GOING}
                pages={expiring}
                rowKey={(row) => row.checkpoint_id}
                empty={null}
              />
            </>
          )}
        </section>
        {left.items.length > 0 && (
          <section aria-labelledby="kept">
            <h2 id="kept">What matches and is kept</h2>
            <DataTable
              label="Checkpoints that are kept"
              columns={KEPT}
              pages={left}
              rowKey={(row) => row.checkpoint_id}
              empty={null}
            />
          </section>
        )}
      </div>
      {asked !== null && <Confirm wanted={wanted} asked={asked} onDone={onDone} onClose={() => setAsked(null)} />}
    </>
  );
}

interface ConfirmProps {
  wanted: Wanted;
  asked: Asked;
  onDone: (outcome: Outcome) => void;
  onClose: () => void;
}

/** How far it is with a run. */
interface Progress {
  done: number;
  error?: unknown;
}

function Confirm({ wanted, asked, onDone, onClose }: ConfirmProps) {
  const { parts, count, freed, purgeAt } = asked;
  const [reason, setReason] = useState("");
  const [progress, setProgress] = useState<ReadonlyMap<string, Progress> | null>(null);

  const onPart: OnPart = ({ run, ids }, error) =>
    setProgress((old) => {
      const before: Progress = old?.get(run) ?? { done: 0 };
      const now = error === undefined ? { ...before, done: before.done + ids.length } : { ...before, error };
      return new Map(old).set(run, now);
    });

  async function prune() {
    setProgress(new Map());
    onDone(await pruneShown(wanted, parts, reason.trim(), onPart));
  }

  return (
    <ConfirmDialog
      title={`Prune ${plural(parts.length, "run")} of ${wanted.project}`}
      action={`Move ${formatCount(count)} to the trash`}
      typed={String(count)}
      onConfirm={prune}
      onClose={onClose}
    >
      <p>
        {plural(count, "checkpoint")} of {plural(parts.length, "run")} {count === 1 ? "goes" : "go"} to the trash. They
        can be taken back until {purgeAt === null ? "their purge" : <Time at={purgeAt} />}; then the next collection
        frees {freed}.
      </p>
      {/* The fields above may hold another one by now. */}
      <p>Filter: {filterInWords(wanted.filter)}.</p>
      {wanted.allOfRun && <p>Those that a run could be resumed from may be among them.</p>}
      <label className={styles.field}>
        <span>Why (for readers of the audit events)</span>
        <input value={reason} maxLength={1000} onChange={(event) => setReason(event.target.value)} />
      </label>
      {progress !== null && <RunByRun parts={parts} progress={progress} />}
    </ConfirmDialog>
  );
}

function RunByRun({ parts, progress }: { parts: readonly Part[]; progress: ReadonlyMap<string, Progress> }) {
  const failed = parts.filter(({ run }) => progress.get(run)?.error !== undefined);
  const over = parts.filter(({ run, ids }) => progress.get(run)?.done === ids.length);
  const shown = [...failed, ...parts.filter((each) => !failed.includes(each))].slice(0, SHOWN);

  function said({ run, ids }: Part): ReactNode {
    const { done, error }: Progress = progress.get(run) ?? { done: 0 };
    if (error !== undefined) return failureOf(error).detail;
    return `${formatCount(done)} of ${formatCount(ids.length)} done`;
  }

  return (
    <>
      <p role="status">
        {formatCount(over.length)} of {plural(parts.length, "run")} done
        {failed.length > 0 && `, ${formatCount(failed.length)} failed`}
      </p>
      <ul className={styles.said}>
        {shown.map((each) => (
          <li key={each.run}>
            {each.run}: {said(each)}
          </li>
        ))}
        {parts.length > SHOWN && <li>and {plural(parts.length - SHOWN, "other")}</li>}
      </ul>
    </>
  );
}
