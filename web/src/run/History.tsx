import { useQueries } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback, useEffect, useMemo, useState } from "react";
import { type Pages, queryOptions, type Schemas, usePages } from "@/api/client";
import { EmptyState, ErrorState, Loading, Reply } from "@/components/states";
import { formatCount } from "@/format/numbers";
import { AttemptsTable } from "./AttemptsTable";
import styles from "./History.module.css";
import { MetricCurve } from "./MetricCurve";
import { HEARTBEAT_MS, UNTIL_LAUNCHED_MS, useGoodput, useRestorePoint } from "./replies";
import { makeLanes, type Point, stepsOf } from "./timeline/lanes";
import { type Inset, Legend, Timeline } from "./timeline/Timeline";

type CheckpointView = Schemas["CheckpointView"];

/** More are not drawn: a screen has no room for them, and the first look must be fast. */
const MOST_CHECKPOINTS = 1000;
const PAGE = 250;

/** The metric curve above the timeline of attempts, on the same steps, and the attempts as a table. */
export function History({ project, run }: { project: string; run: string }) {
  const { from, to } = useSearch({ from: "/runs/$run" });
  const attempts = usePages(
    "/v1/projects/{project}/runs/{run}/attempts",
    { path: { project, run }, query: { limit: 100 } },
    { askedAgainAfter: (known) => (isLive(known) ? HEARTBEAT_MS : UNTIL_LAUNCHED_MS) },
  );
  const checkpoints = usePages("/v1/projects/{project}/runs/{run}/checkpoints", {
    path: { project, run },
    query: { limit: PAGE, min_step: from ?? null, max_step: to ?? null },
  });
  useNewest(checkpoints, MOST_CHECKPOINTS);
  const resumedFrom = useResumedFrom(attempts.items, checkpoints.items);
  const goodput = useGoodput(project, run);
  const decision = useRestorePoint(project, run);

  const bases = useMemo(
    () =>
      new Map(
        (goodput.data?.attempts ?? []).flatMap(({ attempt, resumed_from_step: step }) =>
          step === null ? [] : [[attempt, step] as const],
        ),
      ),
    [goodput.data],
  );
  const lanes = useMemo(
    () => makeLanes(attempts.items, checkpoints.items, resumedFrom, bases),
    [attempts.items, checkpoints.items, resumedFrom, bases],
  );
  const steps = useMemo(() => stepsOf(lanes, from, to), [lanes, from, to]);
  const [inset, setInset] = useState<Inset | null>(null);
  // A plot tells its place at each drawing: what is as before makes nothing be drawn anew.
  const onInset = useCallback(
    (told: Inset | null) =>
      setInset((known) => (known?.left === told?.left && known?.width === told?.width ? known : told)),
    [],
  );

  if (attempts.isPending) return <Loading what="the attempts" />;
  if (attempts.error && attempts.items.length === 0) {
    return <ErrorState error={attempts.error} onRetry={attempts.retry} />;
  }
  if (lanes.length === 0) {
    return (
      <EmptyState title="No attempt is known">
        <p>An attempt begins when the training script opens the checkpointer.</p>
      </EmptyState>
    );
  }
  return (
    <>
      <section aria-labelledby="timeline">
        <div className={styles.heading}>
          <h2 id="timeline">Attempts over steps</h2>
          <StepRange steps={steps} />
        </div>
        <div className="panel">
          <MetricCurve
            project={project}
            run={run}
            checkpoints={checkpoints}
            attempts={attempts.items}
            resumedFrom={resumedFrom}
            steps={steps}
            askedAgainAfter={isLive(attempts.items) && HEARTBEAT_MS}
            onInset={onInset}
          />
          <Timeline
            lanes={lanes}
            steps={steps}
            restorePoint={decision.data?.restore_point?.checkpoint_id}
            inset={inset}
          />
          <Legend />
          {checkpoints.error ? <ErrorState error={checkpoints.error} onRetry={checkpoints.retry} /> : null}
          {checkpoints.hasMore && checkpoints.items.length >= MOST_CHECKPOINTS && (
            <p className="quiet">
              The {formatCount(checkpoints.items.length)} checkpoints of the largest steps are drawn. Narrow the steps
              to see earlier ones.
            </p>
          )}
        </div>
      </section>
      <section aria-labelledby="attempts">
        <h2 id="attempts">Attempts</h2>
        <Reply of={{ ...goodput, data: goodput.data ?? (goodput.isLoading ? undefined : null) }} what="the attempts">
          {(found) => <AttemptsTable pages={attempts} lanes={lanes} goodput={found} />}
        </Reply>
      </section>
    </>
  );
}

function isLive(attempts: readonly Schemas["AttemptView"][]): boolean {
  const newest = attempts.reduce((found, each) => Math.max(found, each.number), 0);
  return attempts.some((each) => each.number === newest && each.ended_at === null);
}

/** Reads on until so many are there. */
function useNewest<Item>({ items, hasMore, error, isLoadingMore, loadMore }: Pages<Item>, most: number) {
  const wants = hasMore && !error && !isLoadingMore && items.length < most;
  useEffect(() => {
    if (wants) loadMore();
  }, [wants, loadMore]);
}

/** The attempt and step of each checkpoint that an attempt resumed from: those that are not loaded are asked for. */
function useResumedFrom(attempts: readonly Schemas["AttemptView"][], checkpoints: readonly CheckpointView[]) {
  const loaded = useMemo(() => new Map(checkpoints.map((each) => [each.id, each])), [checkpoints]);
  const wanted = useMemo(
    () => [...new Set(attempts.flatMap(({ resumed_from: id }) => (id === null || loaded.has(id) ? [] : [id])))],
    [attempts, loaded],
  );
  const combine = useCallback(
    (replies: { data?: CheckpointView | undefined }[]) => {
      const found = new Map<string, Point>(loaded);
      for (const { data } of replies) if (data) found.set(data.id, data);
      return found;
    },
    [loaded],
  );
  return useQueries({
    queries: wanted.map((id) => ({
      ...queryOptions("get", "/v1/checkpoints/{checkpoint_id}", { params: { path: { checkpoint_id: id } } }),
      staleTime: Number.POSITIVE_INFINITY, // its attempt and step never change
    })),
    combine,
  });
}

/** The steps that are shown, as numbers to type; a selection in the plot by the mouse does the same. */
function StepRange({ steps }: { steps: readonly [number, number] }) {
  const { from, to } = useSearch({ from: "/runs/$run" });
  const navigate = useNavigate({ from: "/runs/$run" });
  return (
    <form
      className="row"
      key={`${from} ${to}`}
      onSubmit={(event) => {
        event.preventDefault();
        const given = new FormData(event.currentTarget);
        const number = (name: string) => {
          const text = String(given.get(name) ?? "").trim();
          return text === "" ? undefined : Number(text);
        };
        void navigate({ search: (old) => ({ ...old, from: number("from"), to: number("to") }), resetScroll: false });
      }}
    >
      <label>
        Steps from{" "}
        <input
          className={styles.step}
          name="from"
          type="number"
          min={0}
          defaultValue={from}
          placeholder={String(steps[0])}
        />
      </label>
      <label>
        to{" "}
        <input
          className={styles.step}
          name="to"
          type="number"
          min={0}
          defaultValue={to}
          placeholder={String(steps[1])}
        />
      </label>
      <button type="submit">Show</button>
      {(from !== undefined || to !== undefined) && (
        <Link to="." search={(old) => ({ ...old, from: undefined, to: undefined })} resetScroll={false}>
          All steps
        </Link>
      )}
    </form>
  );
}
