import type { ReactNode } from "react";
import { type Schemas, usePages, useQuery } from "@/api/client";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { Age, Bytes, Nothing } from "@/components/values";
import { formatCount, formatShare } from "@/format/numbers";
import { ASKED_AGAIN } from "@/live/refresh";
import { RunName } from "./RunName";
import { Tags } from "./Tags";

type RunView = Schemas["RunView"];

const column = createColumnHelper<RunView>();
const COLUMNS: Columns<RunView> = [
  column.accessor("name", {
    header: "Run",
    size: 180,
    cell: ({ row: { original: run } }) => <RunName project={run.project} run={run.name} />,
  }),
  column.accessor("status", {
    header: "Status",
    size: 105,
    cell: ({ getValue }) => <StateBadge state={getValue() ?? "unknown"} />,
  }),
  column.accessor("last_step", {
    header: "Last step",
    size: 95,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Step step={getValue()} />,
  }),
  column.accessor("restore_point.step", {
    header: "Restore point",
    size: 115,
    meta: { align: "right", phone: false },
    cell: ({ row }) => <Step step={row.original.restore_point?.step} />,
  }),
  column.display({
    id: "age",
    header: "Its age",
    size: 105,
    meta: { align: "right" },
    cell: ({ row }) => <Age since={row.original.restore_point?.committed_at} />,
  }),
  column.display({
    id: "goodput",
    header: "Goodput",
    size: 90,
    meta: { align: "right", phone: false },
    cell: ({ row }) => <Goodput project={row.original.project} run={row.original.name} />,
  }),
  column.accessor("tags", {
    header: "Tags",
    size: 130,
    meta: { phone: false },
    cell: ({ row: { original: run } }) => <Tags project={run.project} tags={run.tags} />,
  }),
  column.accessor("committed_checkpoints", {
    header: "Checkpoints",
    size: 110,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  column.accessor("logical_bytes", {
    header: "States",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
];

function Step({ step }: { step: number | null | undefined }) {
  return step == null ? <Nothing /> : formatCount(step);
}

/** Of one run at a time: asked for the rows in sight alone, and after the table is there. */
function Goodput({ project, run }: { project: string; run: string }) {
  const params = { path: { project, run } };
  const { data, isLoading } = useQuery(
    "get",
    "/v1/projects/{project}/runs/{run}/goodput",
    { params },
    { staleTime: 60_000 },
  );
  if (isLoading) return <span aria-hidden="true">…</span>;
  return data?.goodput == null ? <Nothing why="unknown" /> : formatShare(data.goodput);
}

interface RunsTableProps {
  project: string;
  /** None: all. */
  statuses: Schemas["RunStatus"][];
  tag?: string | undefined;
  empty: ReactNode;
}

export function RunsTable({ project, statuses, tag, empty }: RunsTableProps) {
  const pages = usePages(
    "/v1/projects/{project}/runs",
    { path: { project }, query: { limit: 100, ...(statuses.length > 0 && { status: statuses }), ...(tag && { tag }) } },
    ASKED_AGAIN,
  );
  return <DataTable label="Runs" columns={COLUMNS} pages={pages} rowKey={(run) => run.id} empty={empty} />;
}
