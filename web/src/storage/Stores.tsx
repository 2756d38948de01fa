import { type Schemas, useQuery } from "@/api/client";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { Reply } from "@/components/states";
import { Age, Nothing } from "@/components/values";

type Store = Schemas["StoreView"] & { clock: Schemas["StoreClock"] | undefined };
const store = createColumnHelper<Store>();
const STORES: Columns<Store> = [
  store.accessor("role", { header: "Store", size: 90 }),
  store.display({
    id: "answers",
    header: "State",
    size: 110,
    cell: ({ row: { original } }) => {
      const bad = original.problem ?? original.clock?.problem;
      return bad != null ? (
        <StateBadge state="unavailable" />
      ) : (
        <StateBadge state={original.claimed ? "answers" : "not claimed"} tone={original.claimed ? "good" : "warn"} />
      );
    },
  }),
  store.display({
    id: "what",
    header: "What is wrong",
    size: 260,
    cell: ({ row: { original } }) => {
      const text = [original.problem, original.clock?.problem, ...original.weaknesses].filter(Boolean).join(" ");
      return text === "" ? <Nothing why="nothing" /> : <span title={text}>{text}</span>;
    },
  }),
  store.accessor("kind", { header: "Kind", size: 80, meta: { phone: false } }),
  store.accessor("url", {
    header: "Where",
    size: 240,
    meta: { phone: false },
    cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
  }),
  store.accessor("probed_at", {
    header: "Tested, ago",
    size: 120,
    meta: { phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
  store.accessor("checked_at", {
    header: "Compared, ago",
    size: 130,
    meta: { phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
];

export function Stores() {
  const stores = useQuery("get", "/v1/stores");
  const clocks = useQuery("get", "/v1/store-clocks");
  return (
    <Reply of={stores} what="the stores">
      {({ items }) => (
        <DataTable
          label="Stores"
          columns={STORES}
          pages={allRows(
            items.map((each) => ({ ...each, clock: clocks.data?.items.find((one) => one.role === each.role) })),
          )}
          rowKey={(row) => row.role}
          empty={null}
        />
      )}
    </Reply>
  );
}
