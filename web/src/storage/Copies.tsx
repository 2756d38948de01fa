import { useNavigate, useSearch } from "@tanstack/react-router";
import { type Schemas, usePages } from "@/api/client";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Age, Bytes, Nothing } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatCount } from "@/format/numbers";
import { isLate } from "./objectives";

const bad = createColumnHelper<Schemas["BadCopy"]>();
const BAD: Columns<Schemas["BadCopy"]> = [
  bad.accessor("lost", {
    header: "State",
    size: 100,
    cell: ({ row: { original } }) => (
      <StateBadge
        state={original.lost ? "lost" : original.repaired_at !== null ? "repaired" : original.state}
        {...(original.repaired_at !== null && !original.lost ? { tone: "good" as const } : {})}
      />
    ),
  }),
  bad.accessor("digest", {
    header: "Chunk",
    size: 200,
    cell: ({ getValue }) => <code title={getValue()}>{getValue()}</code>,
  }),
  bad.accessor("store", { header: "Store", size: 90, meta: { phone: false } }),
  bad.accessor("finding", {
    header: "What was found",
    size: 240,
    cell: ({ getValue }) => <span title={getValue() ?? ""}>{getValue() ?? "–"}</span>,
  }),
  bad.accessor("checkpoints", { header: "Checkpoints", size: 110, meta: { align: "right", phone: false } }),
  bad.accessor("stored_bytes", {
    header: "Bytes",
    size: 95,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  bad.accessor("bad_at", {
    header: "Found, ago",
    size: 120,
    meta: { phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
];

export function BadCopies({ project }: { project: string }) {
  const pages = usePages("/v1/projects/{project}/bad-copies", { path: { project }, query: { limit: 100 } });
  return (
    <DataTable
      label="Bad copies"
      columns={BAD}
      pages={pages}
      rowKey={(row) => `${row.digest} ${row.store} ${row.codec} ${row.storage_class}`}
      empty={
        <EmptyState title="No copy is known to be bad">
          <p>A scrub reads each copy again from time to time.</p>
        </EmptyState>
      }
    />
  );
}

/** How a run's copies are, compared with its objective (RPO) if it has one. */
export function stateOf(of: Schemas["RunCopies"]): { state: string; tone: "good" | "warn" | "bad" | "calm" } {
  if (isLate(of)) return { state: "late", tone: "bad" };
  if (!of.policy) return { state: "no policy", tone: "calm" };
  return of.waiting > 0 ? { state: "behind", tone: "warn" } : { state: "whole", tone: "good" };
}

const copies = createColumnHelper<Schemas["RunCopies"]>();
const COPIES: Columns<Schemas["RunCopies"]> = [
  copies.accessor("run", { header: "Run", size: 160 }),
  copies.display({
    id: "state",
    header: "State",
    size: 110,
    cell: ({ row: { original } }) => <StateBadge {...stateOf(original)} />,
  }),
  copies.accessor("lag_seconds", {
    header: "Behind by",
    size: 120,
    meta: { align: "right" },
    cell: ({ getValue }) => formatSeconds(getValue()),
  }),
  copies.accessor("rpo_objective_seconds", {
    header: "Objective (RPO)",
    size: 150,
    meta: { align: "right", phone: false },
    cell: ({ row: { original } }) =>
      original.rpo_objective_seconds == null ? (
        <Nothing why="no objective" />
      ) : (
        `${formatSeconds(original.rpo_seconds ?? 0)} of ${formatSeconds(original.rpo_objective_seconds)}`
      ),
  }),
  copies.accessor("lag_steps", {
    header: "Steps",
    size: 90,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  copies.accessor("lag_bytes", {
    header: "To copy",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  copies.accessor("copied_step", {
    header: "Newest there",
    size: 120,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => (getValue() == null ? <Nothing /> : formatCount(getValue())),
  }),
  copies.accessor("error", {
    header: "Last error",
    size: 220,
    meta: { phone: false },
    cell: ({ getValue }) => <span title={getValue() ?? ""}>{getValue() ?? "–"}</span>,
  }),
];

export function SecondStore({ project }: { project: string }) {
  const { late } = useSearch({ from: "/storage" });
  const navigate = useNavigate({ from: "/storage" });
  const pages = usePages("/v1/projects/{project}/copies", {
    path: { project },
    query: { limit: 100, ...(late && { late }) },
  });
  if (pages.items.length > 0 && pages.items.every((each) => each.store === null)) {
    return (
      <EmptyState title="The service has no second store">
        <p>Set HOLDFAST_SECOND_STORE, and put a policy of copies: holdfast policies put.</p>
      </EmptyState>
    );
  }
  return (
    <>
      <p>
        <label>
          <input
            type="checkbox"
            checked={late ?? false}
            onChange={({ target }) =>
              void navigate({ search: (old) => ({ ...old, late: target.checked || undefined }), resetScroll: false })
            }
          />{" "}
          Only runs that miss their objective (RPO)
        </label>
      </p>
      <DataTable
        label="Copies in the second store"
        columns={COPIES}
        pages={pages}
        rowKey={(row) => row.run}
        empty={<EmptyState title={late ? "No run misses its objective" : "No run is here yet"} />}
      />
    </>
  );
}
