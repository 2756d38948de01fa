import { useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { api, type Schemas, usePages, useQuery } from "@/api/client";
import { Allowed } from "@/app/Allowed";
import { useProject } from "@/app/project";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { Choice } from "@/components/choose/Choice";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Fact, Facts } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Age, Nothing, Time } from "@/components/values";
import { formatCount, formatShare } from "@/format/numbers";
import { followed, isOver, refresh, WHILE_RUNNING_MS } from "@/live/refresh";
import { RunName } from "@/runs/RunName";
import { Fields } from "../Fields";
import styles from "../Operations.module.css";
import { Details, Everywhere, TextFilter } from "../parts";
import { OPERATION_STATES } from "../route";

type OperationView = Schemas["OperationView"];

const LIST = "/v1/operations";
const ONE = "/v1/operations/{operation_id}";
const KINDS = ["catalog.check", "collect", "compare", "drill", "scrub", "sweep"];

export function LongOperations() {
  return (
    <Allowed scope="read" what="Long operations">
      <OperationList />
    </Allowed>
  );
}

function OperationList() {
  const search = useSearch({ from: "/operations/long" });
  const navigate = useNavigate({ from: "/operations/long" });
  const project = useProject();
  const { state, kind, run, everywhere, operation } = search;
  const [cancelling, setCancelling] = useState<OperationView | null>(null);
  const columns = useMemo(() => makeColumns(setCancelling), []);
  const set = (changed: Partial<typeof search>) => void navigate({ search: (old) => ({ ...old, ...changed }) });

  // A run is named with its project.
  const pages = usePages(
    LIST,
    { query: { ...(everywhere ? {} : { project, run }), state, kind, limit: 100 } },
    { askedAgainAfter: followed },
  );

  return (
    <>
      <p className="quiet">
        Drills, scrubs, sweeps, collections, comparisons and checks that a person began, the newest first.
      </p>
      <div className={styles.bar}>
        <Everywhere
          project={project}
          everywhere={everywhere ?? false}
          onChange={(value) => set({ everywhere: value, run: undefined })}
        />
        <Choice
          className={styles.filter}
          label="State"
          value={state}
          offered={OPERATION_STATES}
          onChange={(value) => set({ state: value })}
        />
        <TextFilter label="Kind" value={kind} known={KINDS} onChange={(value) => set({ kind: value })} />
        {!everywhere && <TextFilter label="Run" value={run} onChange={(value) => set({ run: value })} />}
      </div>
      <DataTable
        label="Long operations"
        columns={columns}
        pages={pages}
        rowKey={(each) => each.id}
        onOpen={(each) => set({ operation: each.id })}
        empty={
          <EmptyState title="No operation is here">
            <p>
              {state || kind || run || (!everywhere && project)
                ? "None fits the filters: widen them, or look at every project."
                : "A drill, a scrub or a sweep begins one."}
            </p>
          </EmptyState>
        }
      />
      {operation !== undefined && (
        <OneOperation id={operation} onCancel={setCancelling} onClose={() => set({ operation: undefined })} />
      )}
      {cancelling && <CancelDialog of={cancelling} onClose={() => setCancelling(null)} />}
    </>
  );
}

function makeColumns(onCancel: (of: OperationView) => void): Columns<OperationView> {
  const column = createColumnHelper<OperationView>();
  return [
    column.accessor("kind", { header: "Kind", size: 110 }),
    column.accessor("state", { header: "State", size: 105, cell: ({ row }) => <State of={row.original} /> }),
    column.display({
      id: "progress",
      header: "Progress",
      size: 150,
      cell: ({ row }) => <Progress of={row.original} />,
    }),
    column.display({
      id: "about",
      header: "About",
      size: 170,
      meta: { phone: false },
      cell: ({ row }) => <About of={row.original} />,
    }),
    column.accessor("created_at", {
      header: "Begun",
      size: 190,
      meta: { phone: false },
      cell: ({ getValue }) => <Time at={getValue()} />,
    }),
    column.accessor("created_by", { header: "By", size: 110, meta: { phone: false } }),
    column.accessor("error", {
      header: "Error",
      size: 200,
      meta: { phone: false },
      cell: ({ getValue }) => {
        const text = getValue();
        return text === null ? <Nothing /> : <span title={text}>{text}</span>;
      },
    }),
    column.display({
      id: "actions",
      header: "Actions",
      size: 90,
      meta: { phone: false },
      cell: ({ row }) => <Cancel of={row.original} onCancel={onCancel} />,
    }),
  ];
}

function State({ of }: { of: OperationView }) {
  if (!isOver(of) && of.cancel_requested_at !== null) return <StateBadge state="cancelling" tone="warn" />;
  return <StateBadge state={of.state} />;
}

function About({ of }: { of: OperationView }) {
  if (of.project === null) return "the whole service";
  if (of.run === null) return of.project;
  return <RunName project={of.project} run={of.run} />;
}

export function Progress({ of }: { of: OperationView }) {
  const { done, total, note } = of.progress;
  if (done == null && note == null) return <Nothing why="not known" />;
  const known = done != null && total != null && total > 0;
  return (
    <span className={styles.progress} title={note ?? undefined}>
      {known && <progress max={total} value={done} aria-label={`Progress of ${of.kind}`} />}
      {known && <span>{formatShare(done / total)}</span>}
      {!known && done != null && (
        <span>
          {formatCount(done)}
          {!isOver(of) && " so far"}
        </span>
      )}
      {!known && done == null && <span>{note}</span>}
    </span>
  );
}

function Cancel({ of, onCancel }: { of: OperationView; onCancel: (of: OperationView) => void }) {
  if (isOver(of)) return null;
  const reason = of.cancel_requested_at === null ? undefined : "It is cancelled as soon as its worker reports.";
  return (
    <div className={styles.actions}>
      <Can scope="operate" reason={reason}>
        <button type="button" aria-label={`Cancel ${of.kind} ${of.id}`} onClick={() => onCancel(of)}>
          Cancel
        </button>
      </Can>
    </div>
  );
}

function CancelDialog({ of, onClose }: { of: OperationView; onClose: () => void }) {
  async function cancel() {
    await api.POST("/v1/operations/{operation_id}/cancel", { params: { path: { operation_id: of.id } } });
    void refresh(LIST, ONE);
  }
  return (
    <ConfirmDialog title={`Cancel the ${of.kind}?`} action="Cancel the operation" onConfirm={cancel} onClose={onClose}>
      <p>
        It ends as soon as its worker reports its progress. What it has done stays done, and it cannot be taken up
        again: begin another one.
      </p>
      <Facts>
        <Fact name="Operation">
          <code>{of.id}</code>
        </Fact>
        <Fact name="About">
          <About of={of} />
        </Fact>
        <Fact name="Progress">
          <Progress of={of} />
        </Fact>
      </Facts>
    </ConfirmDialog>
  );
}

interface OneOperationProps {
  id: string;
  onCancel: (of: OperationView) => void;
  onClose: () => void;
}

function OneOperation({ id, onCancel, onClose }: OneOperationProps) {
  const found = useQuery(
    "get",
    ONE,
    { params: { path: { operation_id: id } } },
    { refetchInterval: ({ state }) => (state.data === undefined || isOver(state.data) ? false : WHILE_RUNNING_MS) },
  );
  return (
    <Details title={found.data ? `${found.data.kind} ${id}` : id} onClose={onClose}>
      <Reply of={found} what="the operation">
        {(of) => (
          <>
            <Facts>
              <Fact name="State">
                <State of={of} />
              </Fact>
              <Fact name="Progress">
                <Progress of={of} /> {of.progress.note}
              </Fact>
              <Fact name="About">
                <About of={of} />
                {of.checkpoint_id !== null && (
                  <>
                    , checkpoint <code>{of.checkpoint_id}</code>
                  </>
                )}
              </Fact>
              <Fact name="Begun">
                <Time at={of.created_at} /> by {of.created_by}
              </Fact>
              <Fact name="A worker began it">
                {of.started_at === null ? (
                  "not yet"
                ) : (
                  <>
                    <Time at={of.started_at} />, {of.tries === 1 ? "once" : `${formatCount(of.tries)} times`}
                  </>
                )}
              </Fact>
              <Fact name="Ended">
                {of.ended_at === null ? (
                  <>
                    not yet, <Age since={of.created_at} />
                  </>
                ) : (
                  <Time at={of.ended_at} />
                )}
              </Fact>
              {of.error !== null && <Fact name="Error">{of.error}</Fact>}
            </Facts>
            <Fields label="Arguments" of={of.arguments} />
            {of.result !== null && <Fields label="Result" of={of.result} />}
            <Cancel of={of} onCancel={onCancel} />
          </>
        )}
      </Reply>
    </Details>
  );
}
