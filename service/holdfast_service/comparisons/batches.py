"""Which bytes of which chunks are read together, within the memory that a comparison may take. Pure.

A tensor is compared by its rows, in the order of its bytes: by elements if every rank stored one run of them, else by
the rows of its first axis of several elements. These are one run in whatever box a rank stored, so any two ways of
cutting a tensor meet. A batch is as many rows as its memory holds, of one tensor or of many small ones, which share
chunks; a chunk is read once in a batch. So what is read in all is known before.

    layouts and digests -> which tensors differ -> parts of their rows -> batches
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from holdfast_protocol.comparison.tensors import StoredTensors, TensorDiff, begin_of, compare_tensors, pieces_of
from holdfast_protocol.index_documents import ITEM_BYTES, Piece, TensorEntry
from holdfast_service.comparisons.sums import is_measurable

_MOST_READS = 8
"""A tensor whose chunks would be read more often than this, because its parts share them, is not compared."""
_MOST_AXES = 30
"""Of a tensor whose boxes are put together: numpy's arrays have 32 before its version 2, and one more is needed."""
_STRIP_MEMORY_BYTES = 1024
"""What it takes to read a strip, besides its bytes: of a hundred thousand tensors of one element that is most."""


class Strip(NamedTuple):
    """What one rank stored of a tensor: `rows` of it from `first` on, each `row_bytes` long here. `box`: the piece, if
    its rows are not the tensor's whole ones."""

    first: int
    rows: int
    row_bytes: int
    rank: int
    piece: Piece
    box: bool


class Run(NamedTuple):
    """Consecutive bytes of a chunk, and where they belong in the strip's rows that were asked for."""

    digest: str
    offset: int
    at: int
    bytes: int


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints."""

    tensors: StoredTensors
    pieces: Mapping[str, Sequence[tuple[int, Piece]]]
    sizes: Mapping[str, int]
    """The bytes of each chunk, by digest."""

    @classmethod
    def of(cls, tensors: StoredTensors, sizes: Mapping[str, int], working: Callable[[], object] = lambda: None) -> Side:
        return cls(tensors, pieces_of(tensors.layout, working), sizes)

    def runs(self, strip: Strip, first: int, last: int) -> Iterator[Run]:
        """Of the strip's rows `first` to `last` of the tensor."""
        begin = (first - strip.first) * strip.row_bytes
        end = (last - strip.first) * strip.row_bytes
        position = 0
        for ordinal, offset, size in strip.piece.segments:
            start, stop = max(begin, position), min(end, position + size)
            if start < stop:
                digest = self.tensors.chunks[strip.rank][ordinal]
                yield Run(digest, offset + start - position, start - begin, stop - start)
            position += size
            if position >= end:
                return


@dataclass(frozen=True)
class Subject:
    """A tensor that is read. `axis` None: its rows are its elements."""

    name: str
    entry: TensorEntry
    axis: int | None
    rows: int
    row_bytes: int
    strips: tuple[Sequence[Strip], Sequence[Strip]]
    """Of the one before, and of the one after."""


class Part(NamedTuple):
    """Rows `first` to `last` of a tensor."""

    subject: Subject
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return (self.last - self.first) * self.subject.row_bytes

    def strips(self, side: int) -> Iterator[tuple[Strip, int, int]]:
        """Those that hold rows of it, with the first of these rows and the end of them."""
        for strip in self.subject.strips[side]:
            first, last = max(self.first, strip.first), min(self.last, strip.first + strip.rows)
            if first < last:
                yield strip, first, last


@dataclass
class Plan:
    """`not_compared`: by name, why. `reads`: the bytes of the chunks of each batch."""

    diff: TensorDiff
    batches: list[list[Part]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    subjects: int = 0
    not_compared: dict[str, Literal["dtype", "layout"]] = field(default_factory=dict)


def plan_batches(before: Side, after: Side, *, memory_bytes: int, working: Callable[[], object] = lambda: None) -> Plan:
    """Of all tensors that digests do not prove equal. `working` is called for each, for its parts and for each batch: a
    plan of millions of pieces takes minutes."""
    plan = Plan(compare_tensors(before.tensors, after.tensors, working))
    sides = (before, after)
    subjects = []
    for name, ours, theirs in _differing(before, after, plan.diff):
        working()
        entry = before.tensors.layout.tensors[name]
        if not is_measurable(entry.dtype):
            plan.not_compared[name] = "dtype"
            continue
        subject = _subject(name, entry, before.pieces.get(ours, ()), after.pieces.get(theirs, ()))
        parts = list(_parts(subject, before, memory_bytes))
        too_many_axes = subject.axis is not None and len(entry.shape) > _MOST_AXES
        if not parts or too_many_axes or _reads_too_often(sides, parts):
            plan.not_compared[name] = "layout"
        else:
            subjects.append((_place(subject, before), parts))
    # In the order in which the chunks were made: what shares a chunk is in one batch.
    subjects.sort(key=lambda each: each[0])
    plan.subjects = len(subjects)
    room = 0
    for part in (part for _, parts in subjects for part in parts):
        working()
        strips = sum(1 for side in (0, 1) for _ in part.strips(side))
        needed = _memory(part) + _STRIP_MEMORY_BYTES * strips
        if (room := room - needed) < 0 or not plan.batches:
            plan.batches.append([])
            room = memory_bytes - needed
        plan.batches[-1].append(part)
    for batch in plan.batches:
        working()
        plan.reads.append(_read_bytes(sides, batch))
    return plan


def _differing(before: Side, after: Side, diff: TensorDiff) -> Iterator[tuple[str, str, str]]:
    """The name, and the names under which the bytes lie in each. Tied ones come once."""
    known: set[tuple[str, str]] = set()
    ones, others = before.tensors.layout.tensors, after.tensors.layout.tensors
    names = [*diff.other_bytes, *diff.undecided, *diff.cut_differently]
    for name in sorted(names, key=lambda name: (ones[name].alias_of is not None, others[name].alias_of is not None)):
        pair = ones[name].alias_of or name, others[name].alias_of or name
        if pair not in known and ones[name].total_bytes:
            known.add(pair)
            yield name, *pair


def _subject(
    name: str, entry: TensorEntry, ours: Sequence[tuple[int, Piece]], theirs: Sequence[tuple[int, Piece]]
) -> Subject:
    item = ITEM_BYTES[entry.dtype]
    begun = [[(rank, piece, *begin_of(piece, entry)) for rank, piece in each] for each in (ours, theirs)]
    if all(box is None for each in begun for _, _, box, _ in each):
        strips = [
            [Strip(start // item, prod(piece.shape), item, rank, piece, box=False) for rank, piece, _, start in each]
            for each in begun
        ]
        return Subject(name, entry, None, prod(entry.shape), item, (strips[0], strips[1]))
    axis = next(axis for axis, size in enumerate(entry.shape) if size != 1)
    strips = [
        [
            Strip(
                piece.offsets[axis],
                piece.shape[axis],
                prod(piece.shape[axis + 1 :]) * item,
                rank,
                piece,
                box=piece.shape[axis + 1 :] != entry.shape[axis + 1 :],
            )
            for rank, piece in each
        ]
        for each in (ours, theirs)
    ]
    return Subject(name, entry, axis, entry.shape[axis], prod(entry.shape[axis + 1 :]) * item, (strips[0], strips[1]))


def _memory(part: Part) -> int:
    """Both arrays; twice where boxes arrive beside them first."""
    return part.bytes * 2 * (1 if part.subject.axis is None else 2)


def _parts(subject: Subject, before: Side, memory_bytes: int) -> Iterator[Part]:
    """They end with the earlier checkpoint's chunks where they can: what is cut alike is then read once. None if one
    row is too large."""
    most = memory_bytes // _memory(Part(subject, 0, 1))
    if not most:
        return
    first = 0
    ends = [] if most >= subject.rows else _ends(subject, before)
    while first < subject.rows:
        last = min(first + most, subject.rows)
        at = bisect_right(ends, last) - 1
        if at >= 0 and ends[at] > first:
            last = ends[at]
        yield Part(subject, first, last)
        first = last


def _ends(subject: Subject, before: Side) -> list[int]:
    """The rows before which a chunk of the earlier checkpoint ends."""
    found = {subject.rows}
    for strip in subject.strips[0]:
        for run in before.runs(strip, strip.first, strip.first + strip.rows):
            end = run.at + run.bytes
            if end % strip.row_bytes == 0:
                found.add(strip.first + end // strip.row_bytes)
    return sorted(found)


def _reads_too_often(sides: tuple[Side, Side], parts: Sequence[Part]) -> bool:
    if len(parts) == 1:
        return False
    return sum(_read_bytes(sides, [part]) for part in parts) > _MOST_READS * 2 * sum(part.bytes for part in parts)


def _read_bytes(sides: tuple[Side, Side], batch: Sequence[Part]) -> int:
    needed: dict[str, int] = {}
    for part in batch:
        for at, side in enumerate(sides):
            for strip, first, last in part.strips(at):
                needed |= {run.digest: side.sizes[run.digest] for run in side.runs(strip, first, last)}
    return sum(needed.values())


def _place(subject: Subject, before: Side) -> tuple[int, int, int, str]:
    """Where its first byte lies: rank, chunk, offset."""
    strip = min(subject.strips[0], key=lambda strip: (strip.first, strip.rank))
    ordinal, offset, _ = strip.piece.segments[0]
    return strip.rank, ordinal, offset, subject.name
