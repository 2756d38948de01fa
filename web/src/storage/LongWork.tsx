import { useEffect, useState } from "react";
import { type Schemas, usePages } from "@/api/client";
import { useOnce } from "@/api/repeats";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Nothing, Time } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatBytes, formatCount } from "@/format/numbers";
import { followed, isOver, refresh } from "@/live/refresh";
import { MEASURED } from "./objectives";
import styles from "./Storage.module.css";

const LIST = "/v1/operations";

interface StartProps<Of> {
  name: string;
  /** undefined: no run is chosen. */
  of: Of | undefined;
  title: string;
  text: string;
  /** `key`: for Idempotency-Key. */
  start: (of: Of, key: string) => Promise<unknown>;
}

export function Start<Of>({ name, of, title, text, start }: StartProps<Of>) {
  const [open, setOpen] = useState(false);
  const begin = useOnce(start);
  return (
    <div className={styles.start}>
      <Can scope="operate" reason={of === undefined ? "Choose a run at the top." : undefined}>
        <button type="button" onClick={() => setOpen(true)}>
          {name}
        </button>
      </Can>
      {open && of !== undefined && (
        <ConfirmDialog
          title={title}
          action="Start"
          onConfirm={async () => {
            await begin(of);
            void refresh(LIST);
          }}
          onClose={() => setOpen(false)}
        >
          <p>{text}</p>
        </ConfirmDialog>
      )}
    </div>
  );
}

type Operation = Schemas["OperationView"];
const operation = createColumnHelper<Operation>();
const OPERATIONS: Columns<Operation> = [
  operation.accessor("state", {
    header: "State",
    size: 100,
    cell: ({ getValue }) => <StateBadge state={getValue()} />,
  }),
  operation.accessor("run", { header: "Run", size: 140, cell: ({ getValue }) => getValue() ?? <Nothing /> }),
  operation.display({
    id: "store",
    header: "Store",
    size: 90,
    meta: { phone: false },
    cell: ({ row }) => String(row.original.arguments.store ?? "–"),
  }),
  operation.display({
    id: "took",
    header: "Took",
    size: 110,
    cell: ({ row: { original } }) =>
      original.started_at === null || original.ended_at === null ? (
        <Nothing why="not over" />
      ) : (
        formatSeconds((Date.parse(original.ended_at) - Date.parse(original.started_at)) / 1000)
      ),
  }),
  operation.accessor("created_at", {
    header: "Started",
    size: 215,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  operation.display({
    id: "said",
    header: "What it says",
    size: 260,
    cell: ({ row: { original } }) => {
      const text = original.error ?? original.progress.note ?? "";
      return <span title={text}>{text}</span>;
    },
  }),
];

/** Of a drill: what it measured, each with the objective of its day. */
const DRILLS: Columns<Operation> = [
  ...OPERATIONS.slice(0, 3),
  ...MEASURED.map(({ id, objective, header }) =>
    operation.display({
      id,
      header,
      size: 190,
      meta: { align: "right" },
      cell: ({ row }) => <Measured value={row.original.result?.[id]} objective={row.original.result?.[objective]} />,
    }),
  ),
  ...OPERATIONS.slice(4),
];

function Measured({ value, objective }: { value: unknown; objective: unknown }) {
  if (typeof value !== "number") return <Nothing why="not known" />;
  if (typeof objective !== "number") return formatSeconds(value);
  const isMet = value <= objective;
  return (
    <>
      {formatSeconds(value)} of {formatSeconds(objective)}{" "}
      <StateBadge state={isMet ? "met" : "missed"} tone={isMet ? "good" : "bad"} />
    </>
  );
}

/** Of a sweep: what no row of the catalog owns, and what was deleted of it. A sweep that only looks leaves no other
 * trace. */
const SWEEPS: Columns<Operation> = [
  ...OPERATIONS.slice(0, 1),
  ...OPERATIONS.slice(2, 4),
  operation.display({
    id: "due",
    header: "Orphans due",
    size: 170,
    cell: ({ row }) => <Amount of={swept(row.original)} count="due_orphans" bytes="due_bytes" />,
  }),
  operation.display({
    id: "deleted",
    header: "Deleted",
    size: 170,
    cell: ({ row: { original } }) =>
      original.arguments.dry_run === true ? (
        <Nothing why="it only looks" />
      ) : (
        <Amount of={swept(original)} count="deleted" bytes="deleted_bytes" />
      ),
  }),
  ...OPERATIONS.slice(4, 5),
  operation.display({
    id: "said",
    header: "What it says",
    size: 260,
    cell: ({ row: { original } }) => {
      const report = swept(original);
      const said = report && [...report.stores.map((each) => each.stopped ?? ""), ...(report.problems ?? [])];
      const text = original.error ?? said?.filter(Boolean).join(" ") ?? original.progress.note ?? "";
      return <span title={text}>{text}</span>;
    },
  }),
];

/** undefined: it is not done. */
function swept(sweep: Operation): Schemas["SweepReport"] | undefined {
  return (sweep.result ?? undefined) as Schemas["SweepReport"] | undefined;
}

interface AmountProps {
  of: Schemas["SweepReport"] | undefined;
  count: "due_orphans" | "deleted";
  bytes: "due_bytes" | "deleted_bytes";
}

function Amount({ of: report, count, bytes }: AmountProps) {
  if (report === undefined) return <Nothing why="not done" />;
  const sum = (name: typeof count | typeof bytes) => report.stores.reduce((all, each) => all + each[name], 0);
  return (
    <>
      {formatCount(sum(count))}, {formatBytes(sum(bytes))}
    </>
  );
}

const COLUMNS: Record<string, Columns<Operation>> = { drill: DRILLS, sweep: SWEEPS };

interface OperationsProps {
  kind: string;
  /** Without it those of the whole service. */
  project?: string;
  empty: string;
  /** Whose reply is another when one has ended. */
  changes?: string;
}

/** What was started by hand, followed until it ends. */
export function Operations({ project, kind, empty, changes }: OperationsProps) {
  const pages = usePages(LIST, { query: { project, kind, limit: 50 } }, { askedAgainAfter: followed });
  const over = pages.items.filter(isOver).length;

  useEffect(() => {
    if (over > 0 && changes !== undefined) void refresh(changes);
  }, [over, changes]);

  return (
    <DataTable
      label={`Operations: ${kind}`}
      columns={COLUMNS[kind] ?? OPERATIONS}
      pages={pages}
      rowKey={(row) => row.id}
      empty={<EmptyState title={empty} />}
    />
  );
}
