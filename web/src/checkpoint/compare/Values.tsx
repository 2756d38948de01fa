import { useMemo, useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { useOnce } from "@/api/repeats";
import { Can } from "@/components/Can";
import { ConfirmDialog } from "@/components/ConfirmDialog";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Section } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Bytes, Nothing, Time } from "@/components/values";
import { formatCount, plural } from "@/format/numbers";
import { followed, refresh } from "@/live/refresh";

type CheckpointView = Schemas["CheckpointView"];
type OperationView = Schemas["OperationView"];

interface Pair {
  one: CheckpointView;
  other: CheckpointView;
}

interface Measured {
  name: string;
  norm_before: number | null;
  norm_after: number | null;
  norm_difference: number | null;
  relative_change: number | null;
  largest_difference: number | null;
  cosine: number | null;
  nan_before: number;
  nan_after: number;
  infinite_before: number;
  infinite_after: number;
}

/** Of the protocol's ValuesCompared, which the API does not type: an operation's result may be of any kind. */
interface ValuesCompared {
  read_bytes: number;
  differing: number;
  equal: number;
  tensors: Measured[];
  components: Measured[];
  not_compared: { name: string; reason: "dtype" | "damaged" | "layout" }[];
  not_compared_left_out: number;
}

const LIST = "/v1/operations";
/** The newest of them that compares with this very checkpoint is shown. */
const LOOKED_AT = 100;

/** How far apart the tensors are that differ: a worker reads and measures them when a person asks. */
export function Values({ one, other }: Pair) {
  const found = useQuery(
    "get",
    LIST,
    { params: { query: { kind: "compare", checkpoint_id: other.id, limit: LOOKED_AT } } },
    { refetchInterval: ({ state: { data } }) => followed(data?.items ?? []) },
  );
  return (
    <Section id="values" title="Tensors by value" aside={<MeasureButton one={one} other={other} />}>
      <Reply of={found} what="what was measured">
        {({ items }) => {
          const newest = items.find((each) => each.arguments.against === one.id && each.arguments.dry_run !== true);
          if (newest === undefined) {
            return <p className="quiet">Nobody has had them measured: digests tell what differs, and not how far.</p>;
          }
          return <Measurement of={newest} />;
        }}
      </Reply>
    </Section>
  );
}

function MeasureButton({ one, other }: Pair) {
  const [isAsking, setAsking] = useState(false);
  const begin = useOnce((against: string, key) =>
    api.POST("/v1/checkpoints/{checkpoint_id}/comparisons", {
      params: { path: { checkpoint_id: other.id }, header: { "idempotency-key": key } },
      body: { against, most_tensors: 100, dry_run: false },
    }),
  );
  return (
    <>
      <Can scope="operate">
        <button type="button" onClick={() => setAsking(true)}>
          Measure
        </button>
      </Can>
      {isAsking && (
        <ConfirmDialog
          title="Measure how far apart they are"
          action="Start"
          onConfirm={async () => {
            await begin(one.id);
            await refresh(LIST);
          }}
          onClose={() => setAsking(false)}
        >
          <p>
            A worker reads each tensor that is not proven equal, from both checkpoints: about{" "}
            <Bytes count={one.chunk_bytes + other.chunk_bytes} /> if all of them differ. It goes on when this page is
            closed.
          </p>
        </ConfirmDialog>
      )}
    </>
  );
}

function Measurement({ of: { state, created_at, error, progress, result } }: { of: OperationView }) {
  const values = result as ValuesCompared | null;
  return (
    <>
      <p>
        <StateBadge state={state} /> <Time at={created_at} />
        {error !== null && <>: {error}</>}
        {(state === "queued" || state === "running") && <Progress {...progress} />}
        {values !== null && (
          <>
            : <Bytes count={values.read_bytes} /> read, {plural(values.differing, "tensor")} measured,{" "}
            {formatCount(values.equal)} equal.
          </>
        )}
      </p>
      {values !== null && <Table {...values} />}
    </>
  );
}

function Progress({ done, total, note }: OperationView["progress"]) {
  return (
    <span className="quiet">
      {" "}
      {note ?? "waits for a worker"}
      {done != null && total != null && (
        <>
          : <Bytes count={done} /> of <Bytes count={total} />
        </>
      )}
    </span>
  );
}

const measured = createColumnHelper<Measured>();
const numberColumn = (name: "relative_change" | "norm_difference" | "largest_difference" | "cosine", header: string) =>
  measured.accessor(name, {
    header,
    size: 130,
    meta: { align: "right", phone: name === "relative_change" },
    cell: ({ getValue }) => {
      const value = getValue();
      return value === null ? <Nothing why="undefined, or too large" /> : String(Number(value.toPrecision(6)));
    },
  });
const COLUMNS: Columns<Measured> = [
  measured.accessor("name", {
    header: "Tensor",
    size: 320,
    cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
  }),
  numberColumn("relative_change", "Relative change"),
  numberColumn("norm_difference", "Norm of it"),
  numberColumn("largest_difference", "Largest"),
  numberColumn("cosine", "Cosine"),
  measured.display({
    id: "finite",
    header: "Not finite",
    size: 130,
    meta: { align: "right" },
    cell: ({ row: { original: each } }) => {
      const [before, after] = [each.nan_before + each.infinite_before, each.nan_after + each.infinite_after];
      return before + after === 0 ? <Nothing /> : `${formatCount(before)}, then ${formatCount(after)}`;
    },
  }),
];

const WHY = {
  dtype: "it is no real number of a known kind",
  damaged: "a chunk of it cannot be read now, and is read again",
  layout: "it is cut so differently that it takes too much memory or too many reads",
};

function Table({ tensors, components, differing, not_compared, not_compared_left_out }: ValuesCompared) {
  const rows = useMemo(
    () => [...components.map((each) => ({ ...each, name: `all that differ in ${each.name}` })), ...tensors],
    [components, tensors],
  );
  const left = not_compared.length + not_compared_left_out;
  return (
    <>
      <DataTable
        label="Tensors by value"
        columns={COLUMNS}
        pages={allRows(rows)}
        rowKey={(each) => each.name}
        empty={<EmptyState title="All the tensors that could differ are equal" />}
      />
      {differing > tensors.length && (
        <p className="quiet">The {formatCount(tensors.length)} that changed most are named.</p>
      )}
      {left > 0 && (
        <details>
          <summary>{plural(left, "tensor")} could not be measured</summary>
          <ul>
            {not_compared.map(({ name, reason }) => (
              <li key={name}>
                {name}: {WHY[reason]}
              </li>
            ))}
          </ul>
        </details>
      )}
    </>
  );
}
