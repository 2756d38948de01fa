import { useMemo } from "react";
import type { Schemas } from "@/api/client";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Bytes, Time } from "@/components/values";
import { formatCount } from "@/format/numbers";
import styles from "./Retention.module.css";
import { SHOWN, type Shown } from "./route";
import { useChangeSearch, useRetentionSearch } from "./useRetention";

type Planned = Schemas["PlannedCheckpoint"];

/** Every reason for which a checkpoint is kept or expires; all of them on hover, where the column is narrow. */
export function Reasons({ reasons }: { reasons: readonly Schemas["Reason"][] }) {
  const text = reasons.map((each) => each.detail).join("; ");
  return <span title={text}>{text}</span>;
}

const column = createColumnHelper<Planned>();
const COLUMNS: Columns<Planned> = [
  column.accessor("keep", {
    header: "",
    size: 80,
    cell: ({ getValue }) => <StateBadge state={getValue() ? "kept" : "expires"} tone={getValue() ? "good" : "warn"} />,
  }),
  column.accessor("step", {
    header: "Step",
    size: 80,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  column.accessor("reasons", { header: "Why", size: 380, cell: ({ getValue }) => <Reasons reasons={getValue()} /> }),
  column.accessor("at", {
    header: "Committed",
    size: 215,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  column.accessor("attempt", { header: "Attempt", size: 90, meta: { align: "right", phone: false } }),
  column.accessor("health", {
    header: "Health",
    size: 105,
    meta: { phone: false },
    cell: ({ getValue }) => <StateBadge state={getValue()} tone={getValue() === "ok" ? "good" : undefined} />,
  }),
  column.accessor("labels", {
    header: "Labels",
    size: 120,
    meta: { phone: false },
    cell: ({ getValue }) => getValue().join(", "),
  }),
  column.accessor("logical_bytes", {
    header: "State",
    size: 95,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
];

const WORDS: Record<Shown, string> = { all: "All", expire: "What expires", keep: "What is kept" };

/** A run's checkpoints under a policy: which are kept and which expire, each with its reasons. */
export function PlanTable({ plan }: { plan: Schemas["RetentionPlan"] }) {
  const { show = "all" } = useRetentionSearch();
  const change = useChangeSearch();
  const pages = useMemo(
    () => allRows(plan.checkpoints.filter((each) => show === "all" || each.keep === (show === "keep"))),
    [plan, show],
  );
  return (
    <>
      <div className={styles.bar}>
        <label>
          Show{" "}
          <select
            value={show}
            onChange={(event) => change({ show: SHOWN.find((each) => each === event.target.value) })}
          >
            {SHOWN.map((each) => (
              <option key={each} value={each}>
                {WORDS[each]}
              </option>
            ))}
          </select>
        </label>
        <span className="quiet">
          {formatCount(plan.expired)} expire, {formatCount(plan.kept)} are kept
        </span>
      </div>
      <DataTable
        label={`Checkpoints of ${plan.run} under this policy`}
        columns={COLUMNS}
        pages={pages}
        rowKey={(row) => row.checkpoint_id}
        empty={
          <EmptyState
            title={show === "expire" ? "Nothing expires" : show === "keep" ? "Nothing is kept" : "No checkpoint yet"}
          >
            <p>
              {show === "all"
                ? "A run has checkpoints once its training script has saved."
                : "Show all to see each one's reasons."}
            </p>
          </EmptyState>
        }
      />
    </>
  );
}
