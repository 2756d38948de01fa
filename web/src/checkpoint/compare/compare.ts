import type { Schemas } from "@/api/client";
import type { Layout, Tensor } from "../tensors/layout";

type ShardView = Schemas["ShardView"];

/** Of two sets of names: each once, in order. */
export function namesOf(one: object, other: object): string[] {
  return [...new Set([...Object.keys(one), ...Object.keys(other)])].sort();
}

export interface ShardMatch {
  rank: number;
  one: ShardView | undefined;
  other: ShardView | undefined;
  isSame: boolean;
}

/** Rank by rank: whether both stored the same bytes, by the shards' digests. */
export function matchShards(one: readonly ShardView[], other: readonly ShardView[]): ShardMatch[] {
  const ones = new Map(one.map((shard) => [shard.rank, shard]));
  const others = new Map(other.map((shard) => [shard.rank, shard]));
  const ranks = [...new Set([...ones.keys(), ...others.keys()])].sort((low, high) => low - high);
  return ranks.map((rank) => {
    const [first, second] = [ones.get(rank), others.get(rank)];
    return { rank, one: first, other: second, isSame: first?.digest != null && first.digest === second?.digest };
  });
}

export type TensorVerdict = "same" | "differs" | "reshaped" | "added" | "removed" | "unknown";

export interface TensorMatch {
  name: string;
  verdict: TensorVerdict;
  bytes: number | null;
}

/** The chunks' digests of each rank, in their order. */
export type ChunkLists = ReadonlyMap<number, readonly string[]>;

/** Tensor by tensor. `same`: its bytes lie at the same places of chunks with the same digests. `differs`: another chunk;
 * it may have changed in a part that belongs to a neighbour. `unknown`: cut otherwise, so digests say nothing. */
export function matchTensors(one: Layout, ones: ChunkLists, other: Layout, others: ChunkLists): TensorMatch[] {
  const [before, after] = [byName(one), byName(other)];
  return namesOf(Object.fromEntries(before), Object.fromEntries(after)).map((name) => {
    const [first, second] = [before.get(name), after.get(name)];
    const bytes = second?.bytes ?? first?.bytes ?? null;
    return { name, bytes, verdict: verdictOf(first, ones, second, others) };
  });
}

function byName(layout: Layout): Map<string, Tensor> {
  return new Map(layout.tensors.map((tensor) => [tensor.name, tensor]));
}

function verdictOf(
  one: Tensor | undefined,
  ones: ChunkLists,
  other: Tensor | undefined,
  others: ChunkLists,
): TensorVerdict {
  if (one === undefined) return "added";
  if (other === undefined) return "removed";
  if (one.dtype !== other.dtype || String(one.shape) !== String(other.shape)) return "reshaped";
  if (one.aliasOf !== null || other.aliasOf !== null) return one.aliasOf === other.aliasOf ? "same" : "unknown";
  const [first, second] = [bytesByBox(one, ones), bytesByBox(other, others)];
  if (first === null || second === null) return "unknown";
  if (first.size !== second.size || [...first.keys()].some((box) => !second.has(box))) return "unknown";
  return [...first].every(([box, places]) => places === second.get(box)) ? "same" : "differs";
}

/** For each box the places of its bytes, from the first rank that has it. null: a chunk list is not known. */
function bytesByBox(tensor: Tensor, lists: ChunkLists): Map<string, string> | null {
  const found = new Map<string, string>();
  for (const { rank, offsets, shape, segments } of tensor.pieces) {
    const box = `${offsets}/${shape}`;
    if (found.has(box)) continue;
    const list = lists.get(rank);
    if (list === undefined) return null;
    if (segments.some(([ordinal]) => list[ordinal] === undefined)) return null;
    found.set(box, segments.map(([ordinal, offset, bytes]) => `${list[ordinal]}:${offset}:${bytes}`).join(" "));
  }
  return found;
}
