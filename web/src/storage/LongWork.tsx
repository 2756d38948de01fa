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
import { followed, isOver, refresh } from "@/live/refresh";
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

/** Of a drill: the time that the restore took, and how far its state was behind the newest commit. */
const DRILLS: Columns<Operation> = [
  ...OPERATIONS.slice(0, 3),
  ...["seconds", "rpo_seconds"].map((name) =>
    operation.display({
      id: name,
      header: name === "seconds" ? "Restored in (RTO)" : "Behind by (RPO)",
      size: 140,
      meta: { align: "right" },
      cell: ({ row }) => {
        const value = row.original.result?.[name];
        return typeof value === "number" ? formatSeconds(value) : <Nothing why="not known" />;
      },
    }),
  ),
  ...OPERATIONS.slice(4),
];

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
      columns={kind === "drill" ? DRILLS : OPERATIONS}
      pages={pages}
      rowKey={(row) => row.id}
      empty={<EmptyState title={empty} />}
    />
  );
}
