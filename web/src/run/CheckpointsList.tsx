import { useNavigate, useSearch } from "@tanstack/react-router";
import { type Schemas, usePages } from "@/api/client";
import { Choice } from "@/components/choose/Choice";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Bytes, Nothing, Time } from "@/components/values";
import { formatCount } from "@/format/numbers";
import { CHECKPOINT_HEALTHS, CHECKPOINT_STATES, type CheckpointState, type Health } from "./route";

type CheckpointView = Schemas["CheckpointView"];

const column = createColumnHelper<CheckpointView>();
const COLUMNS: Columns<CheckpointView> = [
  column.accessor("step", {
    header: "Step",
    size: 90,
    meta: { align: "right" },
    cell: ({ row: { original: each } }) => <CheckpointName id={each.id}>{formatCount(each.step)}</CheckpointName>,
  }),
  column.accessor("attempt", {
    header: "Attempt",
    size: 90,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => `#${formatCount(getValue())}`,
  }),
  column.accessor("state", {
    header: "State",
    size: 110,
    cell: ({ row: { original: each } }) => (
      <span title={each.abort_reason ?? each.trash_reason ?? undefined}>
        <StateBadge state={each.state} />
      </span>
    ),
  }),
  column.accessor("health", {
    header: "Health",
    size: 110,
    cell: ({ row: { original: each } }) => (
      <span title={each.health_reason ?? undefined}>
        <StateBadge state={each.health} />
      </span>
    ),
  }),
  column.accessor("kind", { header: "Kind", size: 100, meta: { phone: false } }),
  column.accessor("created_at", {
    header: "Saved",
    size: 210,
    meta: { phone: false },
    cell: ({ row: { original: each } }) => <Time at={each.committed_at ?? each.created_at} />,
  }),
  column.accessor("logical_bytes", {
    header: "Bytes",
    size: 100,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  column.accessor("uploaded_bytes", {
    header: "Sent",
    size: 95,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
  column.display({
    id: "marks",
    header: "Labels",
    size: 180,
    meta: { phone: false },
    cell: ({ row: { original: each } }) => <Marks checkpoint={each} />,
  }),
];

/** Its labels, and what else sets it apart from others. */
function Marks({ checkpoint }: { checkpoint: CheckpointView }) {
  const words = [
    ...checkpoint.labels,
    checkpoint.pinned_at != null && "pinned",
    checkpoint.detached && "detached",
    checkpoint.tier !== "hot" && checkpoint.tier,
    checkpoint.unproven && "unproven",
  ].filter(Boolean);
  return words.length === 0 ? <Nothing /> : <span title={words.join(", ")}>{words.join(", ")}</span>;
}

/** The run's checkpoints, the largest step first, filtered by the address. */
export function CheckpointsList({ project, run }: { project: string; run: string }) {
  const { state, health, label, from, to } = useSearch({ from: "/runs/$run" });
  const navigate = useNavigate({ from: "/runs/$run" });
  const pages = usePages("/v1/projects/{project}/runs/{run}/checkpoints", {
    path: { project, run },
    query: {
      limit: 100,
      ...(state && { state: [state] }),
      ...(health && { health: [health] }),
      ...(label && { label }),
      min_step: from ?? null,
      max_step: to ?? null,
    },
  });
  const isFiltered = [state, health, label, from, to].some((each) => each !== undefined);

  function filter(change: { state?: CheckpointState; health?: Health; label?: string }) {
    void navigate({ search: (old) => ({ ...old, ...change }), replace: true, resetScroll: false });
  }

  return (
    <section aria-labelledby="checkpoints">
      <h2 id="checkpoints">Checkpoints</h2>
      <form
        className="row"
        onSubmit={(event) => {
          event.preventDefault();
          filter({ label: String(new FormData(event.currentTarget).get("label") ?? "").trim() || undefined });
        }}
      >
        <Choice
          label="State"
          value={state}
          offered={CHECKPOINT_STATES}
          onChange={(chosen) => filter({ state: chosen })}
        />
        <Choice
          label="Health"
          value={health}
          offered={CHECKPOINT_HEALTHS}
          onChange={(chosen) => filter({ health: chosen })}
        />
        <label>
          Label <input name="label" defaultValue={label} key={label} autoComplete="off" size={12} />
        </label>
        <button type="submit">Filter</button>
        {isFiltered && (
          <button
            type="button"
            onClick={() =>
              void navigate({
                search: ({ state: _state, health: _health, label: _label, from: _from, to: _to, ...rest }) => rest,
                resetScroll: false,
              })
            }
          >
            Show all
          </button>
        )}
        {(from !== undefined || to !== undefined) && (
          <span className="quiet">
            Of steps {from === undefined ? "up" : formatCount(from)} to{" "}
            {to === undefined ? "the last" : formatCount(to)}
          </span>
        )}
      </form>
      <DataTable
        label="Checkpoints"
        columns={COLUMNS}
        pages={pages}
        rowKey={(each) => each.id}
        onOpen={({ id }) => void navigate({ to: "/checkpoints/$id", params: { id }, search: { project } })}
        empty={
          <EmptyState title={isFiltered ? "No checkpoint matches the filter" : "No checkpoint is here yet"}>
            <p>
              {isFiltered
                ? "Take a filter away, or show all."
                : "The first one appears when the training script saves: ckpt.step(step, state)."}
            </p>
          </EmptyState>
        }
      />
    </section>
  );
}
