import { useNavigate, useSearch } from "@tanstack/react-router";
import { type Schemas, usePages } from "@/api/client";
import { Allowed } from "@/app/Allowed";
import { useProject } from "@/app/project";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { EmptyState } from "@/components/states";
import { Age, Nothing, Time } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { EVENT_TYPES } from "@/live/touches";
import { useLive } from "@/live/useLive";
import { RunName } from "@/runs/RunName";
import styles from "../Operations.module.css";
import { Everywhere, Period, TextFilter } from "../parts";
import { EventTypes } from "./EventTypes";

type EventView = Schemas["EventView"];

const column = createColumnHelper<EventView>();
const COLUMNS: Columns<EventView> = [
  column.accessor("timestamp", {
    header: "When",
    size: 205,
    meta: { phone: false },
    cell: ({ getValue }) => <Time at={getValue()} />,
  }),
  column.display({ id: "ago", header: "Ago", size: 118, cell: ({ row }) => <Age since={row.original.timestamp} /> }),
  column.accessor("type", { header: "Event", size: 165 }),
  column.accessor("data.project", {
    header: "Project",
    size: 120,
    meta: { phone: false },
    cell: ({ getValue }) => getValue() ?? "all of them",
  }),
  column.display({
    id: "run",
    header: "Run",
    size: 105,
    cell: ({ row: { original: event } }) => {
      const { project, run } = event.data;
      return project && run ? <RunName project={project} run={run} /> : <Nothing />;
    },
  }),
  column.accessor("data.attempt", {
    header: "Attempt",
    size: 75,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => getValue() ?? <Nothing />,
  }),
  column.accessor("data.step", {
    header: "Step",
    size: 90,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => {
      const step = getValue();
      return step == null ? <Nothing /> : formatCount(step);
    },
  }),
  column.display({
    id: "what",
    header: "What",
    size: 280,
    meta: { phone: false },
    cell: ({ row: { original: event } }) => {
      const { reason, store, operation } = event.data;
      const text = [store && `${store} store`, reason, operation].filter(Boolean).join(": ");
      return text === "" ? <Nothing /> : <span title={text}>{text}</span>;
    },
  }),
];

export function Events() {
  return (
    <Allowed scope="read" what="Events">
      <EventList />
    </Allowed>
  );
}

function EventList() {
  const search = useSearch({ from: "/operations/events" });
  const navigate = useNavigate({ from: "/operations/events" });
  const project = useProject();
  const { type, run, since, until, everywhere } = search;
  const set = (changed: Partial<typeof search>) => void navigate({ search: (old) => ({ ...old, ...changed }) });
  const pages = usePages("/v1/events", {
    query: { ...(everywhere ? {} : { project, run }), type, since, until, limit: 100 },
  });
  return (
    <>
      <div className={styles.bar}>
        <Everywhere
          project={project}
          everywhere={everywhere ?? false}
          onChange={(value) => set({ everywhere: value, run: undefined })}
        />
        {!everywhere && <TextFilter label="Run" value={run} onChange={(value) => set({ run: value })} />}
        <Period since={since} until={until} onChange={set} />
      </div>
      <details className={styles.types} open={type !== undefined}>
        <summary>{type === undefined ? "Every type" : `Types: ${type.join(", ")}`}</summary>
        <EventTypes
          chosen={type ?? []}
          onChange={(chosen) =>
            set({ type: chosen.length === 0 || chosen.length === EVENT_TYPES.length ? undefined : chosen })
          }
        />
      </details>
      {everywhere && <FollowAll />}
      <DataTable
        label="Events"
        columns={COLUMNS}
        pages={pages}
        rowKey={(event) => event.id}
        empty={
          <EmptyState title="No event is here">
            <p>
              {type || run || since || until
                ? "None fits the filters: widen them."
                : "A commit, a restore, a failure and a drill make one. It appears here by itself."}
            </p>
          </EmptyState>
        }
      />
    </>
  );
}

/** The frame follows the project that is chosen; this follows all of them. */
function FollowAll() {
  useLive(undefined);
  return null;
}
