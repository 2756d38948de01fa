import { useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo } from "react";
import { type Pages, type Schemas, usePages } from "@/api/client";
import { formatMetric, numberOf } from "@/checkpoint/metric";
import { Choice } from "@/components/choose/Choice";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Bytes, Nothing, Time } from "@/components/values";
import { readMoment } from "@/format/moments";
import { formatCount, plural } from "@/format/numbers";
import { metricNames } from "./metrics";
import { CHECKPOINT_HEALTHS, CHECKPOINT_STATES, type RunSearch } from "./route";

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

/** Of these, with the value of a metric before the labels. */
function columnsWith(metric: string | undefined): Columns<CheckpointView> {
  if (metric === undefined) return COLUMNS;
  const value = column.display({
    id: "metric",
    header: metric,
    size: 120,
    meta: { align: "right", phone: false },
    cell: ({ row: { original: each } }) => formatMetric(each.metrics[metric]) || <Nothing />,
  });
  return [...COLUMNS.slice(0, -1), value, ...COLUMNS.slice(-1)];
}

/** The best ones of what the filter leaves: whether less or more is better, the reader knows. */
function Extremes({ metric, pages }: { metric: string; pages: Pages<CheckpointView> }) {
  const found = pages.items
    .filter((each) => each.state === "committed" && each.health === "ok")
    .flatMap((each) => {
      const value = numberOf(each.metrics[metric]);
      return value === null ? [] : [{ each, value }];
    })
    .sort((one, other) => one.value - other.value);
  const [least, greatest] = [found[0], found.at(-1)];
  if (least === undefined || greatest === undefined) return null;
  return (
    <p>
      Least {metric}: <Extreme of={least} />; greatest: <Extreme of={greatest} />
      <span className="quiet">
        {" "}
        among {plural(found.length, "healthy checkpoint")}
        {pages.hasMore && " that are loaded; scroll down for more"}
      </span>
    </p>
  );
}

function Extreme({ of: { each, value } }: { of: { each: CheckpointView; value: number } }) {
  return (
    <>
      {Number(value.toPrecision(6))} at{" "}
      <CheckpointName id={each.id}>{`step ${formatCount(each.step)} #${each.attempt}`}</CheckpointName>
    </>
  );
}

/** A day in the reader's time zone, as an input of the type date has it. */
function dayOf(moment: string | undefined): string | undefined {
  if (moment === undefined) return undefined;
  const at = new Date(moment);
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 10);
}

/** The moment when the day that was typed begins. Of the day that stands there already `now`, a link's exact moment, is
 * kept. */
function dayBegins(day: string, now: string | undefined): string | undefined {
  return day === (dayOf(now) ?? "") ? now : readMoment(`${day}T00:00`);
}

/** Later ones have a fifth digit, and are no dates of the API. */
const LAST_DAY = "9999-12-31";

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

const NO_FILTER = {
  ...{ state: undefined, health: undefined, label: undefined, from: undefined, to: undefined },
  ...{ since: undefined, until: undefined },
};

/** The run's checkpoints, the largest step first, filtered by the address. */
export function CheckpointsList({ project, run }: { project: string; run: string }) {
  const { state, health, label, from, to, since, until, metric: chosen } = useSearch({ from: "/runs/$run" });
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
      ...(since && { committed_since: since }),
      ...(until && { committed_before: until }),
    },
  });
  const metric = chosen ?? metricNames(pages.items)[0];
  const columns = useMemo(() => columnsWith(metric), [metric]);
  const isFiltered = [state, health, label, from, to, since, until].some((each) => each !== undefined);

  function filter(change: Pick<RunSearch, "state" | "health" | "label" | "since" | "until">) {
    void navigate({ search: (old) => ({ ...old, ...change }), replace: true, resetScroll: false });
  }

  return (
    <section aria-labelledby="checkpoints">
      <h2 id="checkpoints">Checkpoints</h2>
      <form
        className="row"
        onSubmit={(event) => {
          event.preventDefault();
          const given = new FormData(event.currentTarget);
          const text = (name: string) => String(given.get(name) ?? "").trim();
          filter({
            label: text("label") || undefined,
            since: dayBegins(text("since"), since),
            until: dayBegins(text("until"), until),
          });
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
        <label>
          Committed from <input name="since" type="date" max={LAST_DAY} defaultValue={dayOf(since)} key={since} />
        </label>
        <label>
          before <input name="until" type="date" max={LAST_DAY} defaultValue={dayOf(until)} key={until} />
        </label>
        <button type="submit">Filter</button>
        {isFiltered && (
          <button
            type="button"
            onClick={() =>
              void navigate({
                search: (old) => ({ ...old, ...NO_FILTER }),
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
      {metric !== undefined && <Extremes metric={metric} pages={pages} />}
      <DataTable
        label="Checkpoints"
        columns={columns}
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
