import { Link } from "@tanstack/react-router";
import { useMemo } from "react";
import type { Pages, Schemas } from "@/api/client";
import { type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { CheckpointName } from "@/components/facts/CheckpointName";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState } from "@/components/states";
import { Explained, Nothing, Time } from "@/components/values";
import { formatSeconds } from "@/format/moments";
import { formatCount } from "@/format/numbers";
import type { Lane } from "./timeline/lanes";
import { endOf } from "./timeline/Timeline";

interface AttemptsTableProps {
  pages: Pages<Schemas["AttemptView"]>;
  lanes: readonly Lane[];
  /** Null: it could not be read, and the lanes tell of steps alone. */
  goodput: Schemas["Goodput"] | null;
}

interface Row {
  lane: Lane;
  spent: Schemas["AttemptGoodput"] | undefined;
}

const column = createColumnHelper<Row>();
const COLUMNS: Columns<Row> = [
  column.display({
    id: "number",
    header: "Attempt",
    size: 95,
    cell: ({ row: { original } }) => {
      const { number } = original.lane.attempt;
      return (
        <Link
          to="."
          search={(old) => ({ ...old, before: undefined, after: number })}
          hash="differences"
          title="Compare it with the attempt before"
        >
          #{number}
        </Link>
      );
    },
  }),
  column.display({
    id: "outcome",
    header: "Outcome",
    size: 125,
    cell: ({ row: { original } }) => <StateBadge state={endOf(original.lane)} />,
  }),
  column.display({
    id: "from",
    header: "From step",
    size: 110,
    meta: { align: "right" },
    cell: ({ row: { original } }) => <ResumedFrom lane={original.lane} />,
  }),
  column.display({
    id: "last",
    header: "To step",
    size: 85,
    meta: { align: "right" },
    cell: ({ row: { original } }) => formatCount(original.lane.last),
  }),
  column.display({
    id: "lost",
    header: "Lost steps",
    size: 105,
    meta: { align: "right" },
    cell: ({ row: { original } }) =>
      formatCount(original.spent?.steps_lost ?? original.lane.last - original.lane.keptTo),
  }),
  column.display({
    id: "lost-seconds",
    header: "Lost time",
    size: 105,
    meta: { align: "right", phone: false },
    cell: ({ row: { original } }) => (original.spent ? formatSeconds(original.spent.lost_seconds) : <Nothing />),
  }),
  column.display({
    id: "opened",
    header: "Opened",
    size: 215,
    meta: { phone: false },
    cell: ({ row: { original } }) => <Time at={original.lane.attempt.opened_at} />,
  }),
  column.display({
    id: "wall",
    header: "Lasted",
    size: 80,
    meta: { align: "right", phone: false },
    cell: ({ row: { original } }) => (original.spent ? formatSeconds(original.spent.wall_seconds) : <Nothing />),
  }),
  column.display({
    id: "host",
    header: "Host",
    size: 70,
    meta: { phone: false },
    cell: ({ row: { original } }) => {
      const { host, world_size: ranks } = original.lane.attempt;
      return <span title={`${host}, ${ranks} ranks`}>{host}</span>;
    },
  }),
  column.display({
    id: "why",
    header: "Why it ended",
    size: 160,
    meta: { phone: false },
    cell: ({ row: { original } }) => <Why attempt={original.lane.attempt} />,
  }),
  column.display({
    id: "skipped",
    header: "Skipped when it began",
    size: 190,
    cell: ({ row: { original } }) => <Skipped attempt={original.lane.attempt} />,
  }),
];

function ResumedFrom({ lane: { attempt, base, parent } }: { lane: Lane }) {
  if (attempt.resumed_from === null) return <Nothing why="nothing: it began anew" />;
  return (
    <CheckpointName id={attempt.resumed_from}>
      {parent === null ? formatCount(base) : `${formatCount(base)} #${parent.attempt}`}
    </CheckpointName>
  );
}

/** Why it began no later: the newer checkpoints that could not be restored then. */
function Skipped({ attempt: { skipped } }: { attempt: Schemas["AttemptView"] }) {
  if (skipped == null) return <span className="quiet">not known</span>;
  if (skipped.length === 0) return <Nothing why="nothing: it began at the newest" />;
  const details = skipped.map(({ checkpoint_id, step, detail }) => (
    <div key={checkpoint_id}>
      Step {formatCount(step)}: {detail}
    </div>
  ));
  return (
    <Explained by={details}>{skipped.map(({ step, reason }) => `${formatCount(step)} ${reason}`).join(", ")}</Explained>
  );
}

function Why({ attempt }: { attempt: Schemas["AttemptView"] }) {
  const { error_rank: rank, error_type: type, outcome_detail: detail, notice } = attempt;
  const parts = [
    rank != null && `rank ${rank}`,
    type,
    detail,
    notice && `notice by ${notice.source}${notice.reason && `: ${notice.reason}`}`,
  ].filter(Boolean);
  return parts.length === 0 ? <Nothing /> : <span title={parts.join(": ")}>{parts.join(": ")}</span>;
}

/** What the timeline draws, for those who do not see it; and why each attempt ended. */
export function AttemptsTable({ pages, lanes, goodput }: AttemptsTableProps) {
  const rows = useMemo(() => {
    const spent = new Map(goodput?.attempts.map((each) => [each.attempt, each]));
    return lanes.map((lane) => ({ lane, spent: spent.get(lane.attempt.number) }));
  }, [lanes, goodput]);
  return (
    <DataTable
      label="Attempts"
      columns={COLUMNS}
      pages={{ ...pages, items: rows }}
      rowKey={({ lane }) => String(lane.attempt.number)}
      empty={<EmptyState title="No attempt is known" />}
    />
  );
}
