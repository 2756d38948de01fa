import { api } from "@/api/client";
import { problemOf } from "@/api/problem";

/** One tensor of a checkpoint, whatever ranks hold its pieces. */
export interface Tensor {
  name: string;
  component: string;
  dtype: string;
  shape: number[];
  /** Every rank has the same. */
  replicated: boolean;
  /** The tensor that it is tied to: it has no pieces of its own. */
  aliasOf: string | null;
  /** Of the whole tensor; null: of a dtype that this page does not know. */
  bytes: number | null;
  pieces: Piece[];
}

/** A box of a tensor that one rank stored. Offsets and shape in elements of the whole tensor. */
export interface Piece {
  rank: number;
  offsets: number[];
  shape: number[];
  /** Where its bytes are: [the chunk's place in the rank's list, offset in bytes, bytes]. */
  segments: [number, number, number][];
}

export interface Layout {
  worldSize: number;
  /** By name. */
  tensors: Tensor[];
}

/** A document that the page cannot read, for a reason that no retry mends. */
export class CannotRead extends Error {
  override name = "CannotRead";
}

const FORMAT = "holdfast-layout-1";
const OBJECTS = "/v1/objects/";
/** Compressed. Larger ones (more than some 100,000 pieces) make a browser slow. */
const MOST_BYTES = 16 * 1024 ** 2;

const ITEM_BITS = /(\d+)(?:$|_)/;
const ITEM_BYTES: Record<string, number> = { bool: 1, float4_e2m1fn_x2: 1 };

/** Bytes of one element; null: unknown. Names are torch's. */
export function itemBytes(dtype: string): number | null {
  const known = ITEM_BYTES[dtype];
  if (known !== undefined) return known;
  const bits = dtype.startsWith("float8") ? 8 : Number(ITEM_BITS.exec(dtype)?.[1] ?? Number.NaN);
  return Number.isFinite(bits) ? bits / 8 : null;
}

interface Document {
  format: string;
  world_size: number;
  tensors: Record<
    string,
    { component: string; dtype: string; shape: number[]; replicated: boolean; alias_of?: string | null }
  >;
  shards: { pieces: [number, number[], number[], [number, number, number][]][] }[];
}

/** Reads a layout document (client/holdfast_protocol/index_documents.py describes it). Throws CannotRead. */
export function readLayout(text: string): Layout {
  const document = JSON.parse(text) as Document;
  if (document.format !== FORMAT) {
    throw new CannotRead(`The layout is a “${document.format}” document, and this page reads ${FORMAT} alone.`);
  }
  const names = Object.keys(document.tensors).sort(byCodePoint);
  const tensors = names.map((name): Tensor => {
    const entry = document.tensors[name];
    if (entry === undefined) throw new CannotRead(`The layout has no tensor ${name}.`);
    const { component, dtype, shape, replicated, alias_of } = entry;
    const item = itemBytes(dtype);
    const bytes = item === null ? null : shape.reduce((product, size) => product * size, item);
    return { name, component, dtype, shape, replicated, aliasOf: alias_of ?? null, bytes, pieces: [] };
  });
  document.shards.forEach((shard, rank) => {
    for (const [position, offsets, shape, segments] of shard.pieces) {
      tensors[position]?.pieces.push({ rank, offsets, shape, segments });
    }
  });
  return { worldSize: document.world_size, tensors };
}

/** As Python sorts text: JavaScript's own order differs beyond the first 65,536 code points. */
function byCodePoint(one: string, other: string): number {
  const letters = [...one];
  const others = [...other];
  for (let at = 0; at < Math.min(letters.length, others.length); at += 1) {
    const differs = (letters[at]?.codePointAt(0) ?? 0) - (others[at]?.codePointAt(0) ?? 0);
    if (differs !== 0) return differs;
  }
  return letters.length - others.length;
}

/** The layout of a checkpoint, read as any client reads a chunk: a ticket, then the bytes. A posix store's go through the
 * service. Another store's are at its own address, which the page's policy does not let it ask. Throws CannotRead. */
export async function fetchLayout(checkpointId: string, digest: string, signal?: AbortSignal): Promise<Layout> {
  const params = { path: { checkpoint_id: checkpointId } };
  const { data } = await api.POST("/v1/checkpoints/{checkpoint_id}/reads", {
    params,
    body: { digests: [digest] },
    ...(signal === undefined ? {} : { signal }),
  });
  const ticket = data?.chunks[0];
  if (data === undefined || ticket === undefined) throw new CannotRead("The service gave no ticket for the layout.");
  try {
    if (ticket.kind === "gone") throw new CannotRead("The layout's bytes are gone from every store.");
    const place = new URL(ticket.url || ticket.path, window.location.origin);
    if (ticket.kind !== "http" || !place.pathname.startsWith(OBJECTS)) {
      throw new CannotRead(
        "The tensors stand in a document in the store, and this page asks the service alone: it reads them from stores " +
          "that are folders, and not from object stores.",
      );
    }
    if (ticket.codec !== "raw") {
      throw new CannotRead(`The layout is stored as ${ticket.codec}, which a browser does not unpack.`);
    }
    if (ticket.bytes > MOST_BYTES) throw new CannotRead("The layout is too large to be shown in a browser.");
    // The service may call itself by another address than the one that the reader has: the path is the same.
    const reply = await fetch(place.pathname + place.search, {
      headers: ticket.headers ?? {},
      ...(signal === undefined ? {} : { signal }),
    });
    if (!reply.ok || reply.body === null) throw await problemOf(reply);
    const plain = reply.body.pipeThrough(new DecompressionStream("deflate"));
    return readLayout(await new Response(plain).text());
  } finally {
    // It ends by itself too, a little later.
    void api
      .DELETE("/v1/read-leases/{lease_id}", { params: { path: { lease_id: data.lease_id } } })
      .catch(() => undefined);
  }
}

/** How often a piece is stored: its box, and the ranks that have it. */
export interface Box {
  offsets: number[];
  shape: number[];
  ranks: number[];
}

export function boxesOf(tensor: Tensor): Box[] {
  const found = new Map<string, Box>();
  for (const { rank, offsets, shape } of tensor.pieces) {
    const key = `${offsets}/${shape}`;
    const box = found.get(key);
    if (box === undefined) found.set(key, { offsets, shape, ranks: [rank] });
    else if (!box.ranks.includes(rank)) box.ranks.push(rank);
  }
  return [...found.values()];
}

/** In words: where the tensor is. */
export function placement(tensor: Tensor): string {
  if (tensor.aliasOf !== null) return `tied to ${tensor.aliasOf}`;
  const boxes = boxesOf(tensor);
  const ranks = new Set(tensor.pieces.map((piece) => piece.rank)).size;
  if (boxes.length > 1) return `cut in ${boxes.length}, on ${ranks} ranks`;
  if (boxes.length === 0) return "empty";
  return ranks === 1 ? `rank ${tensor.pieces[0]?.rank}` : `whole, on ${ranks} ranks`;
}

/** The axes along which the tensor is cut, the first two of them. */
export function cutAxes(tensor: Tensor): number[] {
  const axes = tensor.shape.map((_, axis) => axis);
  return axes.filter((axis) => tensor.pieces.some((piece) => piece.shape[axis] !== tensor.shape[axis])).slice(0, 2);
}
