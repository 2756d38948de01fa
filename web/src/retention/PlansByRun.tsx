import { useMemo } from "react";
import type { Schemas } from "@/api/client";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { Bytes } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { useChangeSearch } from "./useRetention";

type Plan = Schemas["RetentionPlan"];

const column = createColumnHelper<Plan>();

/** The runs of a project under its policy; the one that frees most first. */
export function PlansByRun({ plans }: { plans: readonly Plan[] }) {
  const change = useChangeSearch();
  const pages = useMemo(() => allRows([...plans].sort((one, other) => other.freed.bytes - one.freed.bytes)), [plans]);
  // `change` is another function with each rendering, and does the same.
  // biome-ignore lint/correctness/useExhaustiveDependencies: columns are kept between renderings.
  const columns = useMemo<Columns<Plan>>(
    () => [
      column.accessor("run", { header: "Run", size: 200 }),
      column.display({
        id: "level",
        header: "Policy",
        size: 110,
        meta: { phone: false },
        cell: ({ row }) => <StateBadge state={row.original.policy?.level === "run" ? "its own" : "the project’s"} />,
      }),
      column.accessor("expired", {
        header: "Expire",
        size: 80,
        meta: { align: "right" },
        cell: ({ getValue }) => formatCount(getValue()),
      }),
      column.accessor("kept", {
        header: "Kept",
        size: 80,
        meta: { align: "right" },
        cell: ({ getValue }) => formatCount(getValue()),
      }),
      column.accessor("freed.bytes", {
        header: "Bytes freed",
        size: 110,
        meta: { align: "right", phone: false },
        cell: ({ getValue }) => <Bytes count={getValue()} />,
      }),
      column.display({
        id: "list",
        header: "",
        size: 110,
        cell: ({ row }) => (
          <button
            type="button"
            aria-label={`List the checkpoints of ${row.original.run}`}
            onClick={() => change({ listed: row.original.run })}
          >
            List
          </button>
        ),
      }),
    ],
    [],
  );
  return (
    <DataTable
      label="Runs under this policy"
      columns={columns}
      pages={pages}
      rowKey={(row) => row.run}
      empty={null}
      onOpen={(row) => change({ listed: row.run })}
    />
  );
}
