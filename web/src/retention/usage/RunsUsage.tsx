import { useQuery as useQueryOf } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useMemo } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { useAllRuns } from "@/components/choose/allRuns";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { EmptyState, Reply } from "@/components/states";
import { Bytes, Money, Nothing } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { eachOf } from "../actions";
import { OF_THE_RUN } from "../route";

/** Runs whose costs are counted, at most: that is a call for each. */
const MOST_RUNS = 200;

interface Row {
  run: Schemas["RunView"];
  cost: Schemas["CostView"];
  stored: number;
}

const column = createColumnHelper<Row>();
const COLUMNS: Columns<Row> = [
  column.accessor("run.name", { header: "Run", size: 200 }),
  column.accessor("cost.per_month", {
    header: "A month",
    size: 110,
    meta: { align: "right" },
    cell: ({ row: { original } }) => <Money amount={original.cost.per_month} currency={original.cost.currency} />,
  }),
  column.accessor("stored", {
    header: "Stored",
    size: 100,
    meta: { align: "right" },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  column.accessor("run.logical_bytes", {
    header: "States",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  column.accessor("run.deduplicated_bytes", {
    header: "Not sent",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  column.display({
    id: "trashed",
    header: "In the trash",
    size: 110,
    meta: { align: "right", phone: false },
    cell: ({ row }) => <Trashed project={row.original.run.project} run={row.original.run.name} />,
  }),
  column.accessor("run.committed_checkpoints", {
    header: "Checkpoints",
    size: 105,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  column.display({
    id: "policy",
    header: "",
    size: 90,
    cell: ({ row }) => (
      <Link
        from="/retention"
        to="/retention"
        search={(old) => ({ ...old, ...OF_THE_RUN, view: undefined, run: row.original.run.name })}
        aria-label={`The policy of ${row.original.run.name}`}
      >
        Policy
      </Link>
    ),
  }),
  column.display({
    id: "prune",
    header: "",
    size: 80,
    cell: ({ row }) => (
      <Link
        from="/retention"
        to="/retention"
        search={(old) => ({ ...old, ...OF_THE_RUN, view: "prune", run: row.original.run.name })}
        aria-label={`Prune ${row.original.run.name}`}
      >
        Prune
      </Link>
    ),
  }),
];

/** Of the rows in sight alone: a run's usage is counted anew with each call. */
function Trashed({ project, run }: { project: string; run: string }) {
  const { data, isLoading } = useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/usage",
    { params: { path: { project, run } } },
    { staleTime: 60_000 },
  );
  if (isLoading) return <span aria-hidden="true">…</span>;
  return data === undefined ? <Nothing why="unknown" /> : <Bytes count={data.trashed_bytes} />;
}

/** The newest runs of a project with their costs, the one that costs most first. */
export function RunsUsage({ project }: { project: string }) {
  const runs = useAllRuns(project);
  return (
    <Reply of={runs} what="the runs">
      {(found) => (
        <>
          <Costs project={project} runs={found.slice(0, MOST_RUNS)} />
          {found.length > MOST_RUNS && (
            <p className="quiet">
              These are the newest {MOST_RUNS} of {formatCount(found.length)} runs. Choose an older one above to see its
              costs.
            </p>
          )}
        </>
      )}
    </Reply>
  );
}

function Costs({ project, runs }: { project: string; runs: Schemas["RunView"][] }) {
  const names = useMemo(() => runs.map((run) => run.name), [runs]);
  const costs = useQueryOf({
    queryKey: ["get", "/v1/projects/{project}/runs/{run}/cost", { params: { path: { project } }, names }],
    queryFn: ({ signal }) =>
      eachOf(names, async (run) => {
        const { data } = await api.GET("/v1/projects/{project}/runs/{run}/cost", {
          params: { path: { project, run } },
          signal,
        });
        return data as Schemas["CostView"];
      }),
    staleTime: 60_000,
  });
  return (
    <Reply of={costs} what="the costs of the runs">
      {(found) => <Table runs={runs} costs={found} />}
    </Reply>
  );
}

function Table({ runs, costs }: { runs: Schemas["RunView"][]; costs: Schemas["CostView"][] }) {
  const pages = useMemo(() => {
    const byRun = new Map(costs.map((cost) => [cost.run, cost]));
    const rows = runs.flatMap((run) => {
      const cost = byRun.get(run.name);
      return cost === undefined
        ? []
        : [{ run, cost, stored: cost.lines.reduce((sum, line) => sum + line.stored_bytes, 0) }];
    });
    return allRows(rows.sort((one, other) => other.cost.per_month - one.cost.per_month || other.stored - one.stored));
  }, [runs, costs]);
  return (
    <DataTable
      label="Runs and their costs"
      columns={COLUMNS}
      pages={pages}
      rowKey={(row) => row.run.id}
      empty={
        <EmptyState title="No run is here yet">
          <p>A training script makes its run when it opens the checkpointer for the first time.</p>
        </EmptyState>
      }
    />
  );
}
