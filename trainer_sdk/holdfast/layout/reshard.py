"""A Layout and the boxes that this rank wants -> the reads that fill them, from any sharding to any other; carried out.

Flow of a restore: index -> wanted pieces -> **reads** -> fetch and verify each chunk -> scatter -> apply. A chunk holds
a piece's bytes row-major, possibly cut in the middle of a row. Each cut is split into at most 2N-1 boxes (N
dimensions), each box is intersected with the wanted one, and each intersection is one strided copy: a Read. So a
column-wise reshard of a matrix is a few reads, not one per row. Pure, except scatter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from holdfast.layout.plan import LayoutError
from holdfast_protocol.index_documents import ITEM_BYTES, Layout, Piece


class Wants(NamedTuple):
    """What one rank reads: one bit for each digest of a list that is the same on every rank. A few kB, however large
    the job."""

    all: bytes
    first: bytes
    """Those that it reads before restore() returns; the others only after all ranks have these. Empty unless it
    serves."""
    serves: bool
    """It can pass on to other hosts what it has fetched."""


class HostShare(NamedTuple):
    """One rank's part."""

    shared: frozenset[str]
    """Digests that it leaves in the host's folder, because another rank of the host wants them, or another host."""
    order: tuple[str, ...]
    """Every digest that this rank wants, in the order of its fetches: the shared ones first."""
    owned: frozenset[str]
    """Digests that it passes on to other hosts."""
    owners: dict[str, int]
    """Digest -> the rank of another host that passes it on."""


def wanted_bits(universe: Sequence[str], wanted: Collection[str]) -> bytes:
    return np.packbits(
        np.fromiter((digest in wanted for digest in universe), dtype=bool, count=len(universe))
    ).tobytes()


_Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
_Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_PLACES_AT_ONCE = 4096


def share_out(
    universe: Sequence[str],
    wants: Sequence[Wants],
    hosts: Sequence[int],
    rank: int,
    wanted: Iterable[str],
    *,
    transfers: int,
    room: int,
) -> HostShare:
    """Which chunks this rank shares with others, and its order of reading, so that one rank of a host fetches each, and
    one host of those that pass chunks on gets it from the store. Pure.

        wanted by this rank -> bits, one per chunk of the checkpoint -> [gathered] -> shared, and this rank's order

    The shared chunks are taken in windows. Within a window each rank first fetches its own part from the store, while
    the others fetch theirs; then it gets what other hosts own, from each in turn and from the next host first; then it
    reads what the other ranks of its host have fetched. So all ranks fetch at once, none waits for long, and the host's
    disk holds about one window at a time.

    `wants` and `hosts`, a number of each rank's host, are by rank. `room`: the most chunks of a window that hosts pass
    on, because what does not fit into the folder leaves the store again. Every rank computes the same assignment. If a
    rank does not fetch its part, another rank fetches it instead."""

    def bits(packed: bytes) -> _Bools:
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=len(universe)).astype(bool)

    here = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    servers = sorted((each for each, of in enumerate(wants) if of.serves), key=lambda each: (hosts[each], each))
    on_host = np.stack([bits(wants[each].all) for each in here])
    is_passed_on = np.zeros(len(universe), dtype=bool)
    if wants[rank].serves:
        wanting_hosts = np.zeros(len(universe), dtype=np.int64)
        for host in {hosts[each] for each in servers}:
            wanting_hosts += np.any([bits(wants[each].all) for each in servers if hosts[each] == host], axis=0)
        is_passed_on = wanting_hosts > 1
    passed_turn = np.cumsum(is_passed_on) - 1
    places = np.flatnonzero(on_host.any(axis=0) & (is_passed_on | (on_host.sum(axis=0) > 1)))
    on_host, is_passed_on = on_host[:, places], is_passed_on[places]
    turn = np.arange(len(places))

    owner = np.full(len(places), -1)
    passed = np.flatnonzero(is_passed_on)
    for start in range(0, len(passed), _PLACES_AT_ONCE):
        block = passed[start : start + _PLACES_AT_ONCE]
        rows = [[bits(of)[places[block]] for of in (wants[each].all, wants[each].first)] for each in servers]
        owner[block] = _owners(np.array(rows).swapaxes(0, 1), servers, hosts, passed_turn[places[block]])
    owning_host = np.where(is_passed_on, np.asarray(hosts)[owner], hosts[rank])
    is_here = owning_host == hosts[rank]

    readers = on_host.sum(axis=0)
    own = here.index(rank)
    # The n-th of a chunk's readers fetches it; n rotates over the chunks.
    number_of_hosts = max(1, len({hosts[each] for each in servers}))
    rotation = np.where(is_passed_on, passed_turn[places] // number_of_hosts, turn)
    is_fetcher = on_host[own] & (np.cumsum(on_host, axis=0)[own] - 1 == rotation % np.maximum(readers, 1))
    is_fetcher = np.where(is_passed_on & is_here, owner == rank, is_fetcher)

    window = transfers * len(here)
    if len(passed):
        window = max(window, min(transfers * len(servers), room))
    stage = np.where(is_fetcher, np.where(is_here, 0, 1), 2)
    distance = (owning_host - hosts[rank]) % (max(hosts) + 1)
    lap = np.where(stage == 1, passed_turn[places] // number_of_hosts, 0)
    order = np.lexsort((turn, np.where(stage == 1, distance, 0), lap, stage, turn // window))
    shared = [universe[places[at]] for at in order[on_host[own][order]]]
    found = frozenset(shared)
    left = on_host[own] & ((readers > 1) | (owner == rank))
    return HostShare(
        frozenset(universe[places[at]] for at in np.flatnonzero(left)),
        (*shared, *(digest for digest in wanted if digest not in found)),
        frozenset(universe[places[at]] for at in np.flatnonzero(owner == rank)),
        {universe[places[at]]: int(owner[at]) for at in np.flatnonzero(on_host[own] & ~is_here)},
    )


def _owners(wants: _Bools, servers: Sequence[int], hosts: Sequence[int], turn: _Numbers) -> _Numbers:
    """The rank that passes each chunk on: `wants` is (all, first) x servers x chunks. The n-th of the hosts that want
    it, n rotating over the chunks, and in it the n-th rank likewise. Of those that want it first, if any do: the others
    have it too late for them."""
    every, first = wants
    can = np.where(first.any(axis=0), first, every)
    of_server = np.asarray([hosts[each] for each in servers])
    numbers = sorted(set(of_server.tolist()))
    by_host = np.stack([can[of_server == number].any(axis=0) for number in numbers])
    host = np.asarray(numbers)[_nth(by_host, turn)]
    return np.asarray(servers)[_nth(can & (of_server[:, None] == host), turn // by_host.sum(axis=0))]


def _nth(rows: _Bools, turn: _Numbers) -> _Numbers:
    """For each column the row of its n-th True, with n the turn modulo their number."""
    is_it = np.cumsum(rows, axis=0, dtype=np.int32) - 1 == turn % rows.sum(axis=0)
    found: _Numbers = np.argmax(rows & is_it, axis=0)
    return found


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, shape), in elements."""


class WantedPiece(NamedTuple):
    """A box of a stored tensor that this rank will read. `dtype` is the stored one: applying casts."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the destination, which is row-major and contiguous."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Read(NamedTuple):
    """One strided copy: from chunk (rank, ordinal) into the wanted piece `name`. Offsets and strides are in bytes."""

    rank: int
    ordinal: int
    name: str
    item_bytes: int
    shape: tuple[int, ...]
    """Elements copied, per dimension."""
    chunk_offset: int
    chunk_strides: tuple[int, ...]
    destination_offset: int
    destination_strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Payload bytes."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class ReadPlan:
    """The reads, by the chunk that they come from: each chunk is fetched and verified once, whole."""

    by_chunk: Mapping[tuple[int, int], tuple[Read, ...]]
    """(rank, ordinal) -> reads."""

    @property
    def reads(self) -> Iterator[Read]:
        """All reads."""
        for reads in self.by_chunk.values():
            yield from reads


def plan_reads(layout: Layout, wanted: Iterable[WantedPiece], *, prefer_rank: int | None = None) -> ReadPlan:
    """The reads that fill every wanted piece, in (rank, ordinal) order. Several wants of one name are refused.

    A tied tensor reads the tensor that it is tied to. If several ranks stored the same box, the reads take
    `prefer_rank`'s if it is one of them, else the lowest rank's. Raises LayoutError for a tensor that is not stored,
    another dtype, a box outside the tensor, or bytes that no shard holds.
    """
    sources = _pieces_by_tensor(layout, prefer_rank)
    by_chunk: dict[tuple[int, int], list[Read]] = defaultdict(list)
    seen: set[str] = set()
    for want in wanted:
        if want.name in seen:
            raise LayoutError(f"tensor {want.name!r} is wanted twice by one rank")
        seen.add(want.name)
        entry = layout.tensors.get(want.name)
        if entry is None:
            raise LayoutError(f"this checkpoint has no tensor {want.name!r}")
        if entry.dtype != want.dtype or not _inside(want, entry.shape):
            raise LayoutError(f"{want} does not fit the stored tensor {entry}")
        filled = 0
        for rank, piece in sources[entry.alias_of or want.name]:
            for read in _reads_of_piece(rank, piece, want):
                by_chunk[read.rank, read.ordinal].append(read)
                filled += read.bytes
        if filled != want.bytes:
            raise LayoutError(f"the shards hold {filled} of the {want.bytes} bytes of {want}")
    return ReadPlan({key: tuple(by_chunk[key]) for key in sorted(by_chunk)})


class StoredPieces:
    """The stored pieces by their offsets: for a planner that names the piece that it reads, as DCP's does. The function
    `plan_reads` would look at all pieces of the tensor for each of its reads."""

    def __init__(self, layout: Layout, *, prefer_rank: int | None = None) -> None:
        self._tensors = layout.tensors
        self._at: dict[tuple[str, tuple[int, ...]], tuple[int, Piece]] = {}
        for rank in _ranks_in_order(layout, prefer_rank):
            for piece in layout.shards[rank].pieces:
                if prod(piece.shape):
                    self._at.setdefault((piece.tensor, piece.offsets), (rank, piece))

    def plan_reads(self, wanted: Iterable[tuple[WantedPiece, str, tuple[int, ...]]]) -> ReadPlan:
        """As the function of this name. `wanted`: (the piece, under a name of the caller's; the tensor; the offsets of
        a stored piece that contains it). Raises LayoutError if that piece does not contain it."""
        by_chunk: dict[tuple[int, int], list[Read]] = defaultdict(list)
        for want, tensor, begins in wanted:
            found = self._at.get((self._tensors[tensor].alias_of or tensor, begins))
            reads = [] if found is None else list(_reads_of_piece(*found, want))
            if sum(read.bytes for read in reads) != want.bytes:
                raise LayoutError(f"the shards hold no piece of {tensor!r} at {begins} that has all of {want}")
            for read in reads:
                by_chunk[read.rank, read.ordinal].append(read)
        return ReadPlan({key: tuple(by_chunk[key]) for key in sorted(by_chunk)})


def _ranks_in_order(layout: Layout, prefer_rank: int | None) -> list[int]:
    ranks = list(range(layout.world_size))
    if prefer_rank is not None and prefer_rank < layout.world_size:
        ranks.sort(key=lambda rank: rank != prefer_rank)
    return ranks


def _pieces_by_tensor(layout: Layout, prefer_rank: int | None) -> Mapping[str, list[tuple[int, Piece]]]:
    chosen: dict[str, dict[Box, tuple[int, Piece]]] = defaultdict(dict)
    for rank in _ranks_in_order(layout, prefer_rank):
        for piece in layout.shards[rank].pieces:
            chosen[piece.tensor].setdefault((piece.offsets, piece.shape), (rank, piece))
    return defaultdict(list, {name: list(boxes.values()) for name, boxes in chosen.items()})


def _inside(want: WantedPiece, shape: Sequence[int]) -> bool:
    return len(want.offsets) == len(want.shape) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(want.offsets, want.shape, shape, strict=True)
    )


def _reads_of_piece(rank: int, piece: Piece, want: WantedPiece) -> Iterator[Read]:
    if prod(want.shape) == 0 or intersect((piece.offsets, piece.shape), (want.offsets, want.shape)) is None:
        return
    item = ITEM_BYTES[want.dtype]
    strides = row_major_strides(piece.shape, item)
    destination_strides = row_major_strides(want.shape, item)
    start = 0  # bytes of the piece before this segment
    for segment in piece.segments:
        if start % item or segment.bytes % item:
            raise LayoutError(f"a chunk of {piece.tensor!r} is cut inside an element")
        for offsets, shape in linear_range_boxes(piece.shape, start // item, (start + segment.bytes) // item):
            box = (tuple(o + p for o, p in zip(offsets, piece.offsets, strict=True)), shape)
            common = intersect(box, (want.offsets, want.shape))
            if common is None:
                continue
            in_piece = _dot((c - p for c, p in zip(common[0], piece.offsets, strict=True)), strides)
            in_want = _dot((c - w for c, w in zip(common[0], want.offsets, strict=True)), destination_strides)
            yield Read(
                rank=rank,
                ordinal=segment.ordinal,
                name=want.name,
                item_bytes=item,
                shape=common[1],
                chunk_offset=segment.offset + in_piece - start,
                chunk_strides=strides,
                destination_offset=in_want,
                destination_strides=destination_strides,
            )
        start += segment.bytes


def linear_range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a row-major array as disjoint boxes, in order; at most 2N-1 of them."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows [first, last) are whole
    if first > last:  # all inside one row
        row = last
        yield from _in_row(row, linear_range_boxes(shape[1:], start - row * inner, stop - row * inner))
        return
    if start < first * inner:
        row = first - 1
        yield from _in_row(row, linear_range_boxes(shape[1:], start - row * inner, inner))
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _in_row(last, linear_range_boxes(shape[1:], 0, stop - last * inner))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for offsets, shape in boxes:
        yield (row, *offsets), (1, *shape)


def intersect(one: Box, other: Box) -> Box | None:
    """The common box, or None if there is none. 0-d boxes always have one."""
    offsets = tuple(map(max, one[0], other[0]))
    ends = (min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True))
    shape = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return (offsets, shape) if all(size > 0 for size in shape) else None


def row_major_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Strides in bytes of a contiguous array."""
    strides = []
    step = item_bytes
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _dot(index: Iterable[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


class Run(NamedTuple):
    """`bytes` bytes of the wanted piece `name`, from `offset` on."""

    name: str
    offset: int
    bytes: int


def straight(reads: Iterable[Read]) -> Run | None:
    """All reads of one chunk as one run, if they are its first bytes in their order and go to one place. Else None.

    A tensor is cut by bytes, not by rows, so one chunk may be several reads: the rest of a row, whole rows, and the
    beginning of one. Such a chunk arrives in place and is never copied. Pure."""
    first, *others = sorted(reads, key=attrgetter("chunk_offset"))
    end = 0
    for read in (first, *others):
        begins = read.destination_offset - first.destination_offset
        if read.name != first.name or not read.chunk_offset == begins == end or not _is_dense(read):
            return None
        end += read.bytes
    return Run(first.name, first.destination_offset, end)


def _is_dense(read: Read) -> bool:
    """Whether its elements lie side by side, in the chunk and in the piece. A dimension of size 1 needs no stride."""
    return all(
        size == 1 or in_chunk == in_piece == prod(read.shape[axis + 1 :]) * read.item_bytes
        for axis, (size, in_chunk, in_piece) in enumerate(
            zip(read.shape, read.chunk_strides, read.destination_strides, strict=True)
        )
    )


_OPAQUE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Copied as integers, so that no NaN payload can change; 16-byte elements as complex, which numpy moves bit by bit."""


class Elsewhere(Protocol):
    """A destination outside host memory."""

    def take(self, read: Read, chunk: memoryview) -> None:
        """Returns once it has `read`'s elements."""


Room = memoryview | Elsewhere
"""Where a wanted piece's bytes go: all of them, row-major; in host memory a 1-d byte buffer."""


def scatter(read: Read, chunk: memoryview, room: Room) -> None:
    """Copies `read`'s elements from the whole chunk's bytes into the whole piece's room. Several threads may call it at
    once: reads of one plan never overlap in their destination, and numpy copies without the GIL.

    Raises ValueError if the read does not fit them: a hostile layout must not make a copy outside a buffer.
    """
    if read.bytes == 0:
        return
    if not isinstance(room, memoryview):
        room.take(read, chunk)
        return
    source = items_of(chunk, read.chunk_offset, read.shape, read.chunk_strides, read.item_bytes)
    target = items_of(room, read.destination_offset, read.shape, read.destination_strides, read.item_bytes)
    target[...] = source


def items_of(
    buffer: memoryview, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """A strided view of a byte buffer. Raises ValueError if it would reach outside."""
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + item_bytes
    if offset < 0 or any(stride < 0 for stride in strides) or offset + extent > buffer.nbytes:
        raise ValueError(f"a read of {extent} bytes at {offset} does not fit a buffer of {buffer.nbytes} bytes")
    flat = np.frombuffer(buffer, dtype=np.uint8, count=extent, offset=offset)
    item: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = flat[:item_bytes].view(_OPAQUE[item_bytes])
    return as_strided(item, shape=shape, strides=strides)
