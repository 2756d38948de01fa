import { type Schemas, useQuery } from "@/api/client";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Bytes, Nothing, Time } from "@/components/values";

const tier = createColumnHelper<Schemas["TierPlanRow"]>();
const TIERS: Columns<Schemas["TierPlanRow"]> = [
  tier.accessor("step", { header: "Step", size: 90, meta: { align: "right" } }),
  tier.accessor("tier", { header: "Tier", size: 90, cell: ({ getValue }) => <StateBadge state={getValue()} /> }),
  tier.accessor("target", { header: "Moves to", size: 120, cell: ({ getValue }) => getValue() ?? <Nothing /> }),
  tier.accessor("moves_at", {
    header: "When",
    size: 215,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  tier.accessor("moves_bytes", {
    header: "Bytes",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  tier.accessor("stays", {
    header: "Why it stays hot",
    size: 260,
    cell: ({ getValue }) => <span title={getValue() ?? ""}>{getValue() ?? "–"}</span>,
  }),
];

export function Tiers({ project, run }: { project: string; run: string }) {
  const plan = useQuery("get", "/v1/projects/{project}/runs/{run}/tiers/plan", { params: { path: { project, run } } });
  return (
    <Reply of={plan} what="the tiers">
      {({ rows, policy_level }) => (
        <>
          {policy_level === null && <p className="quiet">There is no policy of tiers: all stay hot.</p>}
          <DataTable
            label="Checkpoints and their tiers"
            columns={TIERS}
            pages={allRows(rows)}
            rowKey={(row) => row.checkpoint_id}
            empty={<EmptyState title="No checkpoint yet" />}
          />
        </>
      )}
    </Reply>
  );
}
