import { api, type Schemas } from "@/api/client";

type CopyView = Schemas["CopyView"];
type ShardView = Schemas["ShardView"];

/** Copies of a checkpoint's chunks that are alike: in one store, one class, one state, with one proof. */
export interface CopyGroup {
  store: string;
  storageClass: string | null;
  state: CopyView["state"];
  proof: CopyView["proof"];
  codec: string;
  copies: number;
  storedBytes: number;
  /** When the one was proven that was proven longest ago; null: one of them never was. */
  verifiedAt: string | null;
}

export interface ChunkCopies {
  /** Distinct chunks whose copies were read. */
  chunks: number;
  /** All chunks of the checkpoint were read. */
  isWhole: boolean;
  groups: CopyGroup[];
}

const AT_ONCE = 4;

/** The copies of a checkpoint's first `most` distinct chunks, rank by rank. Each chunk is a call of its own: the API sums
 * no copies of a checkpoint. */
export async function readCopies(
  checkpoint: { id: string; project: string },
  shards: readonly ShardView[],
  most: number,
  signal: AbortSignal,
): Promise<ChunkCopies> {
  const digests = new Set<string>();
  let isWhole = true;
  for (const { rank } of shards) {
    if (digests.size >= most) {
      isWhole = false;
      break;
    }
    const params = { path: { checkpoint_id: checkpoint.id, rank } };
    const { data } = await api.GET("/v1/checkpoints/{checkpoint_id}/shards/{rank}", { params, signal });
    for (const { digest } of data?.chunks ?? []) {
      if (digests.size < most) digests.add(digest);
      else if (!digests.has(digest)) isWhole = false;
    }
  }
  const left = [...digests];
  const found: CopyView[] = [];
  async function read() {
    for (let digest = left.pop(); digest !== undefined; digest = left.pop()) {
      const { data } = await api.GET("/v1/chunks/{digest}/impact", { params: { path: { digest } }, signal });
      for (const chunk of data?.chunks ?? []) if (chunk.project === checkpoint.project) found.push(...chunk.copies);
    }
  }
  await Promise.all(Array.from({ length: AT_ONCE }, read));
  return { chunks: digests.size, isWhole, groups: groupCopies(found) };
}

/** The first store first, and what is bad before what is good. */
export function groupCopies(copies: readonly CopyView[]): CopyGroup[] {
  const groups = new Map<string, CopyGroup>();
  for (const copy of copies) {
    const store = copy.store ?? "detached";
    const key = [store, copy.storage_class, copy.state, copy.proof, copy.codec].join("/");
    const group = groups.get(key);
    if (group === undefined) {
      groups.set(key, {
        store,
        storageClass: copy.storage_class,
        state: copy.state,
        proof: copy.proof,
        codec: copy.codec,
        copies: 1,
        storedBytes: copy.stored_bytes,
        verifiedAt: copy.verified_at,
      });
      continue;
    }
    group.copies += 1;
    group.storedBytes += copy.stored_bytes;
    if (copy.verified_at === null || (group.verifiedAt !== null && copy.verified_at < group.verifiedAt)) {
      group.verifiedAt = copy.verified_at;
    }
  }
  return [...groups.values()].sort(
    (one, other) =>
      place(STORES, one.store) - place(STORES, other.store) ||
      place(WORST, one.state) - place(WORST, other.state) ||
      other.copies - one.copies,
  );
}

const UNDER_WAY: readonly CopyView["state"][] = ["pending", "copying", "thawing", "suspect", "bad", "deleting"];

/** Whether the service works on these copies: a repair replaces a bad one. */
export function isUnderWay({ state }: CopyGroup): boolean {
  return UNDER_WAY.includes(state);
}

const STORES = ["primary", "second", "cold", "detached"];
const WORST = ["bad", "suspect", "pending", "copying"];

function place(order: readonly string[], word: string): number {
  const at = order.indexOf(word);
  return at < 0 ? order.length : at;
}
