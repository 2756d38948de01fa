import { useQuery as useFound } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { api, type Schemas, useQuery } from "@/api/client";
import { allRows, type Columns, createColumnHelper, DataTable } from "@/components/DataTable";
import { Section } from "@/components/facts/Facts";
import { StateBadge } from "@/components/StateBadge";
import { EmptyState, ErrorState, Loading } from "@/components/states";
import { Bytes, Nothing } from "@/components/values";
import { formatCount } from "@/format/numbers";
import styles from "../checkpoint.module.css";
import { CannotRead, type Layout } from "../tensors/layout";
import { useLayout } from "../tensors/TensorsPart";
import {
  type ChunkLists,
  matchShards,
  matchTensors,
  type ShardMatch,
  type TensorMatch,
  type TensorVerdict,
} from "./compare";

type CheckpointView = Schemas["CheckpointView"];
type Manifest = Schemas["Manifest"];

/** Which shards and tensors of two checkpoints are the same bytes, told by digests: nothing of the state is read. */
export function SameBytes({ one, other }: { one: CheckpointView; other: CheckpointView }) {
  const [first, second] = [useManifest(one.id), useManifest(other.id)];
  const failed = [first, second].find((each) => each.error && each.data === undefined);
  if (failed !== undefined) {
    return (
      <Section id="shards" title="Shards by digest">
        <ErrorState error={failed.error} onRetry={() => void failed.refetch()} />
      </Section>
    );
  }
  if (first.data === undefined || second.data === undefined) return <Loading what="the shards" />;
  return (
    <>
      <Shards matches={matchShards(first.data.shards, second.data.shards)} />
      <Section id="tensors" title="Tensors by digest">
        <Tensors one={first.data} other={second.data} />
      </Section>
    </>
  );
}

function useManifest(id: string) {
  return useQuery("get", "/v1/checkpoints/{checkpoint_id}/manifest", { params: { path: { checkpoint_id: id } } });
}

const shardColumn = createColumnHelper<ShardMatch>();
const SHARDS: Columns<ShardMatch> = [
  shardColumn.accessor("rank", { header: "Rank", size: 70, meta: { align: "right" } }),
  shardColumn.display({
    id: "same",
    header: "Bytes",
    size: 110,
    cell: ({ row: { original: match } }) => <StateBadge {...SHARD_WORDS[wordOf(match)]} />,
  }),
  shardColumn.display({
    id: "one",
    header: "Digest of the first",
    size: 240,
    meta: { phone: false },
    cell: ({ row }) => <Digest digest={row.original.one?.digest} />,
  }),
  shardColumn.display({
    id: "other",
    header: "Digest of the second",
    size: 240,
    meta: { phone: false },
    cell: ({ row }) => <Digest digest={row.original.other?.digest} />,
  }),
];

const SHARD_WORDS = {
  same: { state: "same", tone: "good" },
  differs: { state: "differ", tone: "calm" },
  alone: { state: "only in one", tone: "warn" },
} as const;

function wordOf({ one, other, isSame }: ShardMatch): keyof typeof SHARD_WORDS {
  if (one === undefined || other === undefined) return "alone";
  return isSame ? "same" : "differs";
}

function Digest({ digest }: { digest: string | null | undefined }) {
  return digest == null ? <Nothing /> : <code title={digest}>{digest}</code>;
}

function Shards({ matches }: { matches: ShardMatch[] }) {
  const same = matches.filter((match) => match.isSame).length;
  return (
    <Section id="shards" title="Shards by digest">
      <p>
        {formatCount(same)} of {formatCount(matches.length)} shards are the same bytes.
      </p>
      <DataTable
        label="Shards by digest"
        columns={SHARDS}
        pages={allRows(matches)}
        rowKey={(match) => String(match.rank)}
        empty={<EmptyState title="Neither has shards" />}
      />
    </Section>
  );
}

/** Each rank's chunk list is a call of its own. */
const MOST_RANKS = 256;
const AT_ONCE = 4;

async function readChunkLists(id: string, ranks: number[], signal: AbortSignal): Promise<ChunkLists> {
  const lists = new Map<number, string[]>();
  const left = [...ranks];
  async function read() {
    for (let rank = left.pop(); rank !== undefined; rank = left.pop()) {
      const params = { path: { checkpoint_id: id, rank } };
      const { data } = await api.GET("/v1/checkpoints/{checkpoint_id}/shards/{rank}", { params, signal });
      if (data !== undefined)
        lists.set(
          rank,
          data.chunks.map((chunk) => chunk.digest),
        );
    }
  }
  await Promise.all(Array.from({ length: AT_ONCE }, read));
  return lists;
}

function useChunkLists(manifest: Manifest, enabled: boolean) {
  return useFound({
    queryKey: ["chunk lists", manifest.checkpoint.id],
    queryFn: ({ signal }) =>
      readChunkLists(
        manifest.checkpoint.id,
        manifest.shards.map((shard) => shard.rank),
        signal,
      ),
    enabled,
    staleTime: Number.POSITIVE_INFINITY,
  });
}

function Tensors({ one, other }: { one: Manifest; other: Manifest }) {
  const ranks = Math.max(one.shards.length, other.shards.length);
  const isSmall = ranks <= MOST_RANKS;
  const [first, second] = [
    useLayout(one.checkpoint.id, isSmall ? one.layout_digest : undefined),
    useLayout(other.checkpoint.id, isSmall ? other.layout_digest : undefined),
  ];
  const [ones, others] = [useChunkLists(one, isSmall), useChunkLists(other, isSmall)];
  if (!isSmall) {
    return (
      <EmptyState title="Too many ranks">
        <p>
          The chunk lists of {formatCount(ranks)} ranks are as many calls; the page compares tensors of at most{" "}
          {MOST_RANKS} ranks. The shards above say which ranks differ.
        </p>
      </EmptyState>
    );
  }
  const asked = [first, second, ones, others];
  const failed = asked.find((each) => each.error && each.data === undefined);
  if (failed?.error instanceof CannotRead) {
    return (
      <EmptyState title="The tensors cannot be compared here">
        <p>{failed.error.message}</p>
      </EmptyState>
    );
  }
  if (failed !== undefined) return <ErrorState error={failed.error} onRetry={() => void failed.refetch()} />;
  if (!first.data || !second.data || !ones.data || !others.data) return <Loading what="the tensors" />;
  return <Matches one={first.data} ones={ones.data} other={second.data} others={others.data} />;
}

const VERDICTS: Record<TensorVerdict, { state: string; tone: "good" | "calm" | "warn" }> = {
  same: { state: "same", tone: "good" },
  differs: { state: "differs", tone: "calm" },
  reshaped: { state: "other shape or dtype", tone: "warn" },
  added: { state: "only in the second", tone: "warn" },
  removed: { state: "only in the first", tone: "warn" },
  unknown: { state: "cut otherwise", tone: "calm" },
};

const tensorColumn = createColumnHelper<TensorMatch>();
const TENSORS: Columns<TensorMatch> = [
  tensorColumn.accessor("name", {
    header: "Tensor",
    size: 340,
    cell: ({ getValue }) => <span title={getValue()}>{getValue()}</span>,
  }),
  tensorColumn.accessor("verdict", {
    header: "Bytes",
    size: 150,
    cell: ({ row }) => <StateBadge {...VERDICTS[row.original.verdict]} />,
  }),
  tensorColumn.accessor("bytes", {
    header: "Size",
    size: 90,
    meta: { align: "right" },
    cell: ({ getValue }) => <Bytes count={getValue()} />,
  }),
];

function Matches(props: { one: Layout; ones: ChunkLists; other: Layout; others: ChunkLists }) {
  const { one, ones, other, others } = props;
  const [only, setOnly] = useState<TensorVerdict | "">("");
  const matches = useMemo(() => matchTensors(one, ones, other, others), [one, ones, other, others]);
  const shown = useMemo(() => matches.filter((each) => only === "" || each.verdict === only), [matches, only]);
  const counts = new Map<TensorVerdict, number>();
  for (const { verdict } of matches) counts.set(verdict, (counts.get(verdict) ?? 0) + 1);
  return (
    <>
      <p>
        {[...counts].map(([verdict, count]) => `${VERDICTS[verdict].state}: ${formatCount(count)}`).join(", ")}.
        “Differs” tells of a tensor's chunks: in one that several tensors share, a neighbour may be what changed.
      </p>
      <label className={styles.only}>
        Only{" "}
        <select value={only} onChange={(event) => setOnly(event.target.value as TensorVerdict | "")}>
          <option value="">all</option>
          {[...counts.keys()].map((verdict) => (
            <option key={verdict} value={verdict}>
              {VERDICTS[verdict].state}
            </option>
          ))}
        </select>
      </label>
      <DataTable
        label="Tensors by digest"
        columns={TENSORS}
        pages={allRows(shown)}
        rowKey={(match) => match.name}
        empty={<EmptyState title="Neither has tensors" />}
      />
    </>
  );
}
