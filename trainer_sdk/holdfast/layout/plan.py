"""Pieces -> chunks: what this rank stores and where each byte lies. Pure, no torch, no communication.

Flow: capture -> **plan** -> stage -> hash -> upload. state/tensors.py describes each tensor's local box as a PieceSpec;
`build_local_plan` says which rank stores it, in which chunk. Planning is local: the ranks compare LocalPlan.digest, and
only if one of them changed do they exchange their LocalPlans and build the global Layout. A large tensor has chunks of
its own, so that new or removed neighbours do not change its digests.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

from holdfast_protocol.digests import canonical_bytes, chunk_digest
from holdfast_protocol.index_documents import ITEM_BYTES, Layout, Piece, Segment, ShardLayout, TensorEntry

PackGroup = Literal["declared", "frozen", "trainable", "buffer"]
"""`declared`: the user promises that it does not change. `frozen`: a parameter without a gradient, which may change."""


class LayoutError(ValueError):
    """The ranks' pieces do not make one checkpoint: a disagreement, a gap, or a duplicate name. Names the tensor."""


class PieceSpec(NamedTuple):
    """One rank's box of one tensor, without its bytes. `offsets` and `shape` count elements of the global tensor."""

    name: str
    component: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    replicated: bool
    """Every rank holds the whole tensor, so one of them stores it."""
    pack: PackGroup = "trainable"
    """A small tensor is packed only with its group: constant bytes must not share a chunk with changing ones."""
    owner: int | None = None
    """The rank that stores it, if the hash does not decide (buffers come from rank 0, as in DDP)."""
    replicas: tuple[tuple[int, int], ...] = ()
    """(coordinate, size) of each mesh dimension that holds copies of this box."""
    alias_of: str | None = None
    """The tensor that this one is tied to: it has no bytes of its own."""

    @property
    def bytes(self) -> int:
        """Bytes of this box."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def whole(name: str, component: str, dtype: str, shape: tuple[int, ...], *, replicated: bool) -> PieceSpec:
    """The spec of a tensor that is not sharded."""
    return PieceSpec(name, component, dtype, shape, (0,) * len(shape), shape, replicated)


_FLOAT_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 2,
    "complex64": 4,
    "complex128": 8,
}
"""Bytes of one floating-point number, by which compression orders a chunk into byte planes. A complex number counts as
two. Integers and 8-bit floats are left out: integers are often small or alike already, 8-bit floats are bytes."""


def item_bytes_of_chunks(shard: ShardLayout, dtypes: Mapping[str, str]) -> tuple[int, ...]:
    """By ordinal, the size of the floating-point numbers that most of the chunk's bytes belong to; 1 if most belong to
    none. `dtypes`: by the names of the shard's tensors."""
    by_size: list[Counter[int]] = [Counter() for _ in shard.chunks]
    for piece in shard.pieces:
        size = _FLOAT_BYTES.get(dtypes[piece.tensor], 1)
        for segment in piece.segments:
            by_size[segment.ordinal][size] += segment.bytes
    return tuple(max(sizes, key=lambda size: (sizes[size], size), default=1) for sizes in by_size)


def owns(spec: PieceSpec, rank: int, world_size: int) -> bool:
    """Whether `rank` stores this piece. Pure and local: every rank computes the same from the tensor's name and its own
    coordinates, and exactly one of a box's holders gets True.

    A hash of their names spreads replicated tensors; copies along a mesh dimension likewise, by coordinate.
    """
    if spec.alias_of is not None:
        return False
    if spec.owner is not None:
        return rank == spec.owner
    if spec.replicas:
        return all(
            _spread(f"{dimension}:{spec.name}", size) == coordinate
            for dimension, (coordinate, size) in enumerate(spec.replicas)
        )
    return not spec.replicated or _spread(spec.name, world_size) == rank


def _spread(name: str, over: int) -> int:
    # Python's own hash() is salted per process: the ranks would disagree.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % over


_MIB = 1024 * 1024
_WIDEST_ITEM_BYTES = max(ITEM_BYTES.values())


@dataclass(frozen=True)
class ChunkSizes:
    """How tensors are cut and packed, in bytes. Changing them changes every digest: keep them for the life of a run."""

    own_chunk_bytes: int = 8 * _MIB
    """A piece of this size or more starts its own chunk: from here on a PUT's fixed cost hardly matters."""
    cut_bytes: int = 64 * _MIB
    """The largest chunk; a larger piece is cut into parts of this size."""
    pack_bytes: int = 32 * _MIB
    """Smaller pieces are packed together up to this size."""

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that would cut an element in two, or that contradict each other."""
        if self.cut_bytes <= 0 or self.cut_bytes % _WIDEST_ITEM_BYTES:
            raise ValueError(f"cut_bytes must be a positive multiple of {_WIDEST_ITEM_BYTES}, not {self.cut_bytes}")
        if not 0 < self.own_chunk_bytes <= self.pack_bytes <= self.cut_bytes:
            raise ValueError(
                "chunk sizes must satisfy 0 < own_chunk_bytes <= pack_bytes <= cut_bytes, "
                f"not {self.own_chunk_bytes}, {self.pack_bytes}, {self.cut_bytes}"
            )


@dataclass(frozen=True)
class LocalPlan:
    """One rank's plan. Plain data: ranks may exchange it in any form."""

    rank: int
    world_size: int
    sizes: ChunkSizes
    specs: tuple[PieceSpec, ...] = field(repr=False)
    """The planned specs, sorted by name: with the same specs the plan stays valid."""
    tensors: dict[str, TensorEntry] = field(repr=False)
    """Every tensor that this rank sees, whether or not it stores it."""
    shard: ShardLayout = field(repr=False)
    """The part that this rank stores."""
    digest: str
    """SHA-256 over all of the above, dtypes included."""

    @cached_property
    def item_bytes(self) -> tuple[int, ...]:
        """By chunk ordinal, the size of its floating-point numbers (_FLOAT_BYTES)."""
        return item_bytes_of_chunks(self.shard, {name: entry.dtype for name, entry in self.tensors.items()})

    @cached_property
    def component_bytes(self) -> Mapping[str, int]:
        """By component, the bytes that this rank stores of it; 0 for one that is not there."""
        stored: Counter[str] = Counter()
        for piece in self.shard.pieces:
            stored[self.tensors[piece.tensor].component] += sum(segment.bytes for segment in piece.segments)
        return stored


def build_local_plan(
    specs: Iterable[PieceSpec],
    *,
    rank: int,
    world_size: int,
    sizes: ChunkSizes | None = None,
    previous: LocalPlan | None = None,
) -> LocalPlan:
    """Plans this rank's pieces. Deterministic: the order of `specs` does not matter.

    Returns `previous` unchanged (same object) if it fits, so that a save in steady state plans nothing.
    Raises LayoutError if two specs have one name.
    """
    sizes = sizes or ChunkSizes()
    ordered = tuple(sorted(specs, key=attrgetter("name")))
    if previous is not None and (previous.rank, previous.world_size, previous.sizes, previous.specs) == (
        rank,
        world_size,
        sizes,
        ordered,
    ):
        return previous
    for first, second in pairwise(ordered):
        if first.name == second.name:
            raise LayoutError(f"two tensors of the state are both named {first.name!r}; rename one of the components")
    tensors = {
        spec.name: TensorEntry(spec.component, spec.dtype, spec.global_shape, spec.replicated, spec.alias_of)
        for spec in ordered
    }
    shard = place([spec for spec in ordered if owns(spec, rank, world_size)], sizes)
    digest = chunk_digest(
        canonical_bytes([rank, world_size, [sizes.own_chunk_bytes, sizes.cut_bytes, sizes.pack_bytes], ordered, shard])
    )
    return LocalPlan(rank, world_size, sizes, ordered, tensors, shard, digest)


def global_layout(plans: Sequence[LocalPlan]) -> Layout:
    """All the ranks' plans -> the one Layout, the same on every rank. Order does not matter.

    Raises LayoutError, naming the tensor, if ranks disagree about it or no rank stores a part of it.
    """
    ordered = sorted(plans, key=attrgetter("rank"))
    if [(plan.rank, plan.world_size) for plan in ordered] != [(rank, len(ordered)) for rank in range(len(ordered))]:
        raise LayoutError(f"plans of ranks {[plan.rank for plan in ordered]} do not make one world")
    tensors = agreed_entries([plan.tensors for plan in ordered])
    layout = Layout(len(ordered), tensors, tuple(plan.shard for plan in ordered))
    check_whole(layout)
    return layout


def agreed_entries(of_ranks: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """What all ranks, in their order, say of the tensors. Raises LayoutError, naming the tensor, if two disagree."""
    tensors: dict[str, TensorEntry] = {}
    for rank, entries in enumerate(of_ranks):
        for name, entry in entries.items():
            if tensors.setdefault(name, entry) != entry:
                raise LayoutError(
                    f"rank {rank} describes tensor {name!r} as {entry} and an earlier rank as {tensors[name]}; "
                    "build the model, its dtypes and its sharding alike on all ranks"
                )
    return tensors


def check_whole(layout: Layout) -> None:
    """Raises LayoutError, naming the tensor, if no rank stores a part of it, or if parts of it overlap."""
    torn = layout.torn()
    if torn is None:
        return
    boxes = {(p.offsets, p.shape) for shard in layout.shards for p in shard.pieces if p.tensor == torn}
    elements, whole = sum(prod(shape) for _, shape in boxes), prod(layout.tensors[torn].shape)
    raise LayoutError(
        f"the ranks together store {elements} of the {whole} elements of tensor {torn!r}"
        f"{' or more, and some of them twice' if elements >= whole else ''}; "
        "a tensor that only some ranks hold belongs in a component that is declared per rank"
    )


def place(owned: Sequence[PieceSpec], sizes: ChunkSizes) -> ShardLayout:
    """Where each piece that one rank stores lies; several pieces of one tensor are fine. Deterministic."""
    chunks: list[int] = []
    pieces: list[Piece] = []
    for _, group in groupby(sorted(owned, key=_pack_key), key=_pack_key):
        pack: int | None = None  # the ordinal of the open pack; one group never adds to another's
        for spec in group:
            if spec.bytes == 0:
                continue
            if spec.bytes >= sizes.own_chunk_bytes:
                segments = _cut(spec.bytes, len(chunks), sizes.cut_bytes)
                chunks.extend(segment.bytes for segment in segments)
            else:
                # Aligned to its element, so that both ends can view the bytes in place.
                start = -(-chunks[pack] // ITEM_BYTES[spec.dtype]) * ITEM_BYTES[spec.dtype] if pack is not None else 0
                if pack is None or start + spec.bytes > sizes.pack_bytes:
                    pack, start = len(chunks), 0
                    chunks.append(0)
                segments = (Segment(pack, start, spec.bytes),)
                chunks[pack] = start + spec.bytes
            pieces.append(Piece(spec.name, spec.offsets, spec.shape, segments))
    return ShardLayout(tuple(chunks), tuple(pieces))


def _pack_key(spec: PieceSpec) -> tuple[str, bool, str]:
    return spec.component, spec.replicated, spec.pack


def _cut(total_bytes: int, first_ordinal: int, cut_bytes: int) -> tuple[Segment, ...]:
    return tuple(
        Segment(first_ordinal + at, 0, min(cut_bytes, total_bytes - start))
        for at, start in enumerate(range(0, total_bytes, cut_bytes))
    )
