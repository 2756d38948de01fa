import { useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { Allowed } from "@/app/Allowed";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Fact, Facts } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Age, Nothing, Time } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatCount } from "@/format/numbers";
import { Fields } from "../Fields";
import styles from "../Operations.module.css";
import { type Action, ActionReport, Details, useAction } from "../parts";

type ControllerView = Schemas["ControllerView"];

const PATH = "/v1/controllers";
/** No event tells of a controller. */
const ASKED_EVERY_MS = 5000;

/** The word for what a controller does now, the most urgent first. */
export function stateOf(of: ControllerView): { state: string; tone: "good" | "warn" | "bad" | "calm" } {
  if (of.paused_at !== null) return { state: "paused", tone: "warn" };
  if (of.run_requested_at !== null) return { state: "run requested", tone: "calm" };
  // A failure that a later pass has not got over: the passes after it are recorded.
  if (of.error_at !== null && (of.last_pass_at === null || of.error_at >= of.last_pass_at)) {
    return { state: "failing", tone: "bad" };
  }
  if ((of.leased ?? 0) > 0) return { state: "works", tone: "good" };
  if (of.last_pass_at === null) return { state: "no pass yet", tone: "calm" };
  return { state: "in order", tone: "good" };
}

export function Controllers() {
  return (
    <Allowed scope="read" everyProject what="Controllers">
      <ControllerList />
    </Allowed>
  );
}

function ControllerList() {
  const { controller } = useSearch({ from: "/operations/controllers" });
  const navigate = useNavigate({ from: "/operations/controllers" });
  const found = useQuery("get", PATH, { params: { query: { limit: 500 } } }, { refetchInterval: ASKED_EVERY_MS });
  const action = useAction(PATH);
  const [pausing, setPausing] = useState<string | null>(null);
  const { run, busy } = action;
  const columns = useMemo(
    () => makeColumns((of) => <Actions of={of} run={run} busy={busy} onPause={setPausing} />),
    [run, busy],
  );
  const open = (name: string | undefined) => void navigate({ search: (old) => ({ ...old, controller: name }) });

  return (
    <>
      <p className="quiet">
        What the service does by itself. “Due” waits for a pass; “lag” is how long the oldest of it waits. Open a row
        for its last pass.
      </p>
      <ActionReport of={action} />
      <Reply of={found} what="controllers">
        {({ items }) => {
          const shown = items.find((each) => each.name === controller);
          return (
            <>
              <DataTable
                label="Controllers"
                columns={columns}
                pages={allRows(items)}
                rowKey={(each) => each.name}
                onOpen={(each) => open(each.name)}
                empty={<EmptyState title="This service has no controllers" />}
              />
              {controller !== undefined && (
                <Details title={controller} onClose={() => open(undefined)}>
                  {shown === undefined ? (
                    <p>This service has no controller of that name. Choose one from the table.</p>
                  ) : (
                    <>
                      <OneController of={shown} />
                      <Actions of={shown} run={run} busy={busy} onPause={setPausing} />
                    </>
                  )}
                </Details>
              )}
            </>
          );
        }}
      </Reply>
      {pausing !== null && <PauseDialog name={pausing} action={action} onClose={() => setPausing(null)} />}
    </>
  );
}

function makeColumns(actions: (of: ControllerView) => React.ReactNode): Columns<ControllerView> {
  const column = createColumnHelper<ControllerView>();
  const count = (value: number | null) =>
    value === null ? <Nothing why="its work is not in rows" /> : formatCount(value);
  return [
    column.accessor("name", { header: "Controller", size: 165 }),
    column.display({
      id: "state",
      header: "State",
      size: 110,
      cell: ({ row }) => <StateBadge {...stateOf(row.original)} />,
    }),
    column.accessor("due", {
      header: "Due",
      size: 70,
      meta: { align: "right" },
      cell: ({ getValue }) => count(getValue()),
    }),
    column.accessor("leased", {
      header: "Leased",
      size: 70,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => count(getValue()),
    }),
    column.accessor("lag_seconds", {
      header: "Lag",
      size: 90,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => {
        const seconds = getValue();
        return seconds === null ? <Nothing /> : formatSeconds(seconds);
      },
    }),
    column.accessor("done", {
      header: "Done",
      size: 80,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => count(getValue()),
    }),
    column.accessor("failed", {
      header: "Failed",
      size: 70,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => count(getValue()),
    }),
    column.accessor("last_pass_at", {
      header: "Last pass",
      size: 100,
      meta: { align: "right", phone: false },
      cell: ({ getValue }) => <Age since={getValue()} />,
    }),
    column.accessor("error", {
      header: "Last error, or why it is paused",
      size: 240,
      meta: { phone: false },
      cell: ({ row: { original: of } }) => {
        const text = of.pause_reason ?? of.error;
        return text === null ? <Nothing /> : <span title={text}>{text}</span>;
      },
    }),
    column.display({
      id: "actions",
      header: "Actions",
      size: 175,
      meta: { phone: false },
      cell: ({ row }) => actions(row.original),
    }),
  ];
}

interface ActionsProps {
  of: ControllerView;
  run: Action["run"];
  busy: boolean;
  onPause: (name: string) => void;
}

function Actions({ of, run, busy, onPause }: ActionsProps) {
  const params = { path: { name: of.name } };
  const isPaused = of.paused_at !== null;
  const waits = busy ? "The last action is on its way." : undefined;
  const why = isPaused ? "It is paused. Resume it: then it runs by itself." : waits;
  return (
    <div className={styles.actions}>
      <Can scope="operate" reason={why}>
        <button
          type="button"
          aria-label={`Run ${of.name} now`}
          onClick={() =>
            void run(
              () => api.POST("/v1/controllers/{name}/run", { params }),
              `${of.name}: a process makes a pass now.`,
            )
          }
        >
          Run now
        </button>
      </Can>
      {isPaused ? (
        <Can scope="operate" reason={waits}>
          <button
            type="button"
            aria-label={`Resume ${of.name}`}
            onClick={() => void run(() => api.POST("/v1/controllers/{name}/resume", { params }), `${of.name} goes on.`)}
          >
            Resume
          </button>
        </Can>
      ) : (
        <Can scope="operate" reason={waits}>
          <button type="button" aria-label={`Pause ${of.name}`} onClick={() => onPause(of.name)}>
            Pause
          </button>
        </Can>
      )}
    </div>
  );
}

function PauseDialog({ name, action, onClose }: { name: string; action: Action; onClose: () => void }) {
  const [reason, setReason] = useState("");
  async function pause() {
    const body = { reason: reason.trim() };
    await api.POST("/v1/controllers/{name}/pause", { params: { path: { name } }, body });
    void action.run(() => Promise.resolve(), `${name} is paused: passes under way end, and none begins.`);
  }
  return (
    <ConfirmDialog title={`Pause ${name}`} action="Pause" onConfirm={pause} onClose={onClose}>
      <p>Its work waits, in every process, until an operator resumes it. Passes under way end first.</p>
      <div className={styles.fields}>
        <label className={styles.field}>
          Reason, for those who find it paused
          <input
            required
            pattern=".*\S.*"
            title="A few words"
            maxLength={500}
            value={reason}
            onChange={(event) => setReason(event.target.value)}
          />
        </label>
      </div>
    </ConfirmDialog>
  );
}

function OneController({ of }: { of: ControllerView }) {
  return (
    <>
      <Facts>
        <Fact name="State">
          <StateBadge {...stateOf(of)} />
        </Fact>
        {of.paused_at !== null && (
          <Fact name="Paused">
            <Time at={of.paused_at} /> by {of.paused_by}: {of.pause_reason}
          </Fact>
        )}
        <Fact name="Pause between passes">{formatSeconds(of.interval_seconds)}</Fact>
        <Fact name="Last pass">
          <Time at={of.last_pass_at} />
          {of.pass_seconds !== null && `, took ${of.pass_seconds.toFixed(2)} s`}
        </Fact>
        <Fact name="Run asked for">
          <Time at={of.run_requested_at} />
        </Fact>
        <Fact name="Done, failed">
          {formatCount(of.done)}, {formatCount(of.failed)}
        </Fact>
        <Fact name="Last error">
          {of.error === null ? (
            <Nothing />
          ) : (
            <>
              {of.error} (<Age since={of.error_at} /> ago)
            </>
          )}
        </Fact>
        <Fact name="Last pass with work">
          <Time at={of.report_at} />
        </Fact>
      </Facts>
      {of.report !== null && <Fields label="What that pass found" of={of.report} />}
    </>
  );
}
