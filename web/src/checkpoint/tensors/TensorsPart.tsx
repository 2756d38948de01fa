import { useQuery as useFound } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo } from "react";
import { type Schemas, useQuery } from "@/api/client";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Section } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, Reply } from "@/components/states";
import { Bytes, Nothing } from "@/components/values";
import { formatCount } from "@/format/numbers";
import styles from "../checkpoint.module.css";
import { boxesOf, CannotRead, fetchLayout, type Layout, placement, type Tensor } from "./layout";
import { ShardMap } from "./ShardMap";

type CheckpointView = Schemas["CheckpointView"];
type ShardView = Schemas["ShardView"];

/** What each rank stored, and the tensors with their shard map. */
export function TensorsPart({ checkpoint }: { checkpoint: CheckpointView }) {
  const isWhole = checkpoint.state === "committed" || checkpoint.state === "trashed";
  const manifest = useQuery(
    "get",
    "/v1/checkpoints/{checkpoint_id}/manifest",
    { params: { path: { checkpoint_id: checkpoint.id } } },
    { enabled: isWhole, staleTime: Number.POSITIVE_INFINITY },
  );
  if (!isWhole) {
    return (
      <EmptyState title="It has no manifest">
        <p>It is {checkpoint.state}. What a checkpoint consists of is known while it is committed or in the trash.</p>
      </EmptyState>
    );
  }
  return (
    <Reply of={manifest} what="the manifest">
      {({ shards, layout_digest }) => (
        <>
          <Tensors id={checkpoint.id} digest={layout_digest} />
          <Section id="shards" title="Shards">
            <DataTable
              label="Shards"
              columns={SHARDS}
              pages={allRows(shards)}
              rowKey={(shard) => String(shard.rank)}
              empty={<EmptyState title="It has no shards" />}
            />
          </Section>
        </>
      )}
    </Reply>
  );
}

/** The layout of a checkpoint. It never changes: the digest names it. */
export function useLayout(id: string, digest: string | undefined) {
  return useFound({
    queryKey: ["layout", digest],
    queryFn: ({ signal }) => fetchLayout(id, digest ?? "", signal),
    enabled: digest !== undefined,
    staleTime: Number.POSITIVE_INFINITY,
    retry: (failures, error) => failures < 2 && !(error instanceof CannotRead),
  });
}

function Tensors({ id, digest }: { id: string; digest: string }) {
  const layout = useLayout(id, digest);
  return (
    <Section id="tensors" title="Tensors">
      {layout.error instanceof CannotRead ? (
        <EmptyState title="The tensors cannot be shown here">
          <p>{layout.error.message} What each rank stored stands below.</p>
        </EmptyState>
      ) : (
        <Reply of={layout} what="the tensors">
          {(found) => <List layout={found} />}
        </Reply>
      )}
    </Section>
  );
}

const column = createColumnHelper<Tensor>();

function List({ layout }: { layout: Layout }) {
  const { filter, tensor: chosen } = useSearch({ from: "/checkpoints/$id" });
  const navigate = useNavigate({ from: "/checkpoints/$id" });
  const shown = useMemo(
    () => layout.tensors.filter((each) => filter === undefined || each.name.includes(filter)),
    [layout, filter],
  );
  const total = shown.reduce((sum, each) => sum + (each.aliasOf === null ? (each.bytes ?? 0) : 0), 0);
  const columns = useMemo<Columns<Tensor>>(
    () => [
      column.accessor("name", {
        header: "Tensor",
        size: 300,
        cell: ({ getValue }) => (
          <Link
            from="/checkpoints/$id"
            to="."
            search={(old) => ({ ...old, tensor: getValue() })}
            resetScroll={false}
            title={getValue()}
          >
            {getValue()}
          </Link>
        ),
      }),
      column.accessor("component", { header: "Component", size: 110, meta: { phone: false } }),
      column.accessor("dtype", { header: "Dtype", size: 90 }),
      column.accessor("shape", { header: "Shape", size: 130, cell: ({ getValue }) => formatShape(getValue()) }),
      column.accessor("bytes", {
        header: "Size",
        size: 90,
        meta: { align: "right", phone: false },
        cell: ({ getValue }) => <Bytes count={getValue()} />,
      }),
      column.display({
        id: "placement",
        header: "Where",
        size: 170,
        meta: { phone: false },
        cell: ({ row }) => placement(row.original),
      }),
    ],
    [],
  );
  const found = layout.tensors.find((each) => each.name === chosen);
  return (
    <>
      <div className="row">
        <label>
          Only names with{" "}
          <input
            type="search"
            value={filter ?? ""}
            onChange={(event) =>
              void navigate({
                search: (old) => ({ ...old, filter: event.target.value || undefined }),
                replace: true,
                resetScroll: false,
              })
            }
          />
        </label>
        <span className="quiet" role="status">
          {formatCount(shown.length)} of {formatCount(layout.tensors.length)} tensors, <Bytes count={total} />
        </span>
      </div>
      {chosen !== undefined && (
        <div className={`panel ${styles.plan}`}>
          {found === undefined ? <p>No tensor is called {chosen}.</p> : <One tensor={found} />}
          <Link from="/checkpoints/$id" to="." search={(old) => ({ ...old, tensor: undefined })} resetScroll={false}>
            Close
          </Link>
        </div>
      )}
      <DataTable
        label="Tensors"
        columns={columns}
        pages={allRows(shown)}
        rowKey={(tensor) => tensor.name}
        empty={
          <EmptyState title={filter === undefined ? "It has no tensors" : `No tensor's name has “${filter}” in it`} />
        }
        onOpen={(tensor) => void navigate({ search: (old) => ({ ...old, tensor: tensor.name }), resetScroll: false })}
      />
    </>
  );
}

/** As torch prints it: [1024, 64]. */
export function formatShape(shape: readonly number[]): string {
  return `[${shape.join(", ")}]`;
}

/** Rows of a shard map; a tensor that is cut finer is told by its numbers. */
const MOST_BOXES = 256;

function One({ tensor }: { tensor: Tensor }) {
  const boxes = boxesOf(tensor);
  return (
    <>
      <h3>
        <code>{tensor.name}</code>
      </h3>
      <p>
        {tensor.component}, {tensor.dtype}, {formatShape(tensor.shape)}, {placement(tensor)}
      </p>
      {boxes.length > 1 && boxes.length <= MOST_BOXES && <ShardMap tensor={tensor} boxes={boxes} />}
      {boxes.length > 0 && (
        <div className={styles.boxes}>
          <table className={styles.table}>
            <thead>
              <tr>
                <th scope="col">Ranks</th>
                <th scope="col">Begins at</th>
                <th scope="col">Shape</th>
              </tr>
            </thead>
            <tbody>
              {boxes.slice(0, MOST_BOXES).map(({ ranks, offsets, shape }) => (
                <tr key={`${offsets}/${shape}`}>
                  <td>{ranks.join(", ")}</td>
                  <td>{formatShape(offsets)}</td>
                  <td>{formatShape(shape)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {boxes.length > MOST_BOXES && (
        <p className="quiet">
          The first {MOST_BOXES} of {formatCount(boxes.length)} boxes.
        </p>
      )}
    </>
  );
}

const shardColumn = createColumnHelper<ShardView>();
const SHARDS: Columns<ShardView> = [
  shardColumn.accessor("rank", { header: "Rank", size: 60, meta: { align: "right" } }),
  shardColumn.accessor("state", {
    header: "State",
    size: 90,
    meta: { phone: false },
    cell: ({ getValue }) => <StateBadge state={getValue()} />,
  }),
  shardColumn.display({
    id: "bytes",
    header: "State in the trainer",
    size: 140,
    meta: { align: "right" },
    cell: ({ row: { original: shard } }) => <Bytes count={shard.logical_bytes} />,
  }),
  shardColumn.accessor("chunk_count", {
    header: "Chunks",
    size: 80,
    meta: { align: "right" },
    cell: ({ getValue }) => formatCount(getValue()),
  }),
  shardColumn.accessor("upload_seconds", {
    header: "Upload",
    size: 80,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Seconds seconds={getValue()} />,
  }),
  shardColumn.accessor("blocked_seconds", {
    header: "Blocked",
    size: 80,
    meta: { align: "right", phone: false },
    cell: ({ getValue }) => <Seconds seconds={getValue()} />,
  }),
  shardColumn.display({
    id: "verdict",
    header: "Health",
    size: 110,
    cell: ({ row: { original: shard } }) => <Verdict shard={shard} />,
  }),
  shardColumn.accessor("digest", {
    header: "Digest",
    size: 160,
    meta: { phone: false },
    cell: ({ getValue }) => (getValue() === null ? <Nothing /> : <code title={getValue() ?? ""}>{getValue()}</code>),
  }),
];

function Seconds({ seconds }: { seconds: number | null | undefined }) {
  return seconds == null ? <Nothing why="unknown" /> : `${seconds.toFixed(2)} s`;
}

function Verdict({ shard }: { shard: ShardView }) {
  if (shard.verdict?.healthy === false) {
    return (
      <span title={shard.verdict.reason}>
        <StateBadge state="diverged" />
      </span>
    );
  }
  return shard.finite ? <StateBadge state="healthy" /> : <StateBadge state="not finite" tone="bad" />;
}
