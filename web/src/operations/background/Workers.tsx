import { type Schemas, useQuery } from "@/api/client";
import { Allowed } from "@/app/Allowed";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Age, Nothing } from "@/components/values";
import { formatCount } from "@/format/numbers";

type WorkerView = Schemas["WorkerView"];

const ASKED_EVERY_MS = 10_000;

const column = createColumnHelper<WorkerView>();
const COLUMNS: Columns<WorkerView> = [
  column.accessor("host", { header: "Host", size: 160 }),
  column.accessor("pid", { header: "Process", size: 80, meta: { align: "right" } }),
  column.accessor("kind", { header: "Kind", size: 80, meta: { phone: false } }),
  column.accessor("silent", {
    header: "State",
    size: 90,
    cell: ({ getValue }) => (
      <StateBadge {...(getValue() ? { state: "silent", tone: "bad" } : { state: "heard", tone: "good" })} />
    ),
  }),
  column.accessor("seen_at", {
    header: "Heard",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
  column.accessor("started_at", {
    header: "Runs for",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Age since={getValue()} />,
  }),
  column.accessor("version", { header: "Version", size: 90, meta: { phone: false } }),
  column.accessor("stores", {
    header: "Stores",
    size: 130,
    meta: { phone: false },
    cell: ({ getValue }) => Object.keys(getValue() ?? {}).join(", ") || <Nothing />,
  }),
  column.accessor("done", {
    header: "Done, by controller",
    size: 300,
    meta: { phone: false },
    cell: ({ getValue }) => {
      const done = Object.entries<number>(getValue()).filter(([, count]) => count > 0);
      const text = done.map(([name, count]) => `${name} ${formatCount(count)}`).join(", ");
      return text === "" ? <Nothing /> : <span title={text}>{text}</span>;
    },
  }),
];

export function Workers() {
  return (
    <Allowed scope="read" everyProject what="Workers">
      <WorkerList />
    </Allowed>
  );
}

function WorkerList() {
  const found = useQuery(
    "get",
    "/v1/workers",
    { params: { query: { limit: 500 } } },
    { refetchInterval: ASKED_EVERY_MS },
  );
  return (
    <>
      <p className="quiet">
        The processes that serve (<code>holdfast serve</code>) or work (<code>holdfast workers run</code>). A silent one
        was killed, is cut off or hangs: others take its work when its leases run out.
      </p>
      <Reply of={found} what="workers">
        {({ items }) => (
          <DataTable
            label="Workers"
            columns={COLUMNS}
            pages={allRows(items)}
            rowKey={(each) => each.id}
            empty={<EmptyState title="No process has said that it is there" />}
          />
        )}
      </Reply>
    </>
  );
}
