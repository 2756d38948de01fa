"""The tensors of two checkpoints, told by the digests of their chunks. Pure: layouts and digests in, a verdict for each
tensor out. A command uses it, and a worker to know which tensors it need not read.

A digest is that of a whole chunk. Equal digests prove that all in the chunk is equal. Different digests prove that a
tensor differs only if it fills the chunk alone: of several tensors in one chunk, some may be equal all the same. Bytes
are compared by their place in the tensor, so it does not matter which rank stored them. What two saves have cut in
different places has no digests that could be compared (docs/adr/0081).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic import BaseModel, Field

from holdfast_protocol.index_documents import ITEM_BYTES, Box, Layout, Piece, TensorEntry


class TensorForm(BaseModel):
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class OtherForm(BaseModel):
    """A tensor that has another dtype or shape in the other checkpoint."""

    name: str
    before: TensorForm
    after: TensorForm


class TensorDiff(BaseModel):
    """The name of each tensor of either checkpoint, in one of the lists, sorted."""

    only_before: list[str] = Field(default_factory=list)
    only_after: list[str] = Field(default_factory=list)
    other_form: list[OtherForm] = Field(default_factory=list)
    other_bytes: list[str] = Field(default_factory=list)
    undecided: list[str] = Field(default_factory=list)
    """They share a chunk with other tensors, and that chunk is another one: a tensor in it has changed, or others came,
    went or moved."""
    cut_differently: list[str] = Field(default_factory=list)
    """They are cut in different places, so their digests cannot be compared."""
    equal: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class StoredTensors:
    """The layout of one checkpoint, and the digests of the chunks that it speaks of."""

    layout: Layout
    chunks: Mapping[int, Sequence[str]]
    """Stored rank -> the digests of its chunks, by ordinal."""
    values: Mapping[str, str] = field(default_factory=dict)
    """The digest of each component's tree: its values that are no tensors. Of a rank's own the name is `loader@1`, and
    of its random number generators `rng@1`."""


def compare_tensors(
    before: StoredTensors, after: StoredTensors, working: Callable[[], object] = lambda: None
) -> TensorDiff:
    """Linear in the pieces of both. `working` is called for each tensor: millions of pieces take minutes. The places of
    one tensor are dropped before the next one's are made: with all of them alive, Python's collector of garbage would
    look at them again and again."""
    found = TensorDiff()
    ours = pieces_of(before.layout, working)
    theirs = ours if after.layout is before.layout else pieces_of(after.layout, working)
    for name in sorted(before.layout.tensors.keys() | after.layout.tensors.keys()):
        working()
        one, other = before.layout.tensors.get(name), after.layout.tensors.get(name)
        if one is None:
            found.only_after.append(name)
        elif other is None:
            found.only_before.append(name)
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            found.other_form.append(OtherForm(name=name, before=_form(one), after=_form(other)))
        else:
            places = (_spans(before, ours, one.alias_of or name), _spans(after, theirs, other.alias_of or name))
            getattr(found, _verdict(*places)).append(name)
    return found


def _form(entry: TensorEntry) -> TensorForm:
    return TensorForm(dtype=entry.dtype, shape=entry.shape)


class _Span(NamedTuple):
    """Consecutive bytes of a tensor. `start` counts from its first byte, row-major; if the box that a rank stored is no
    one run of these, from the first byte of that box."""

    box: Box | None
    start: int
    bytes: int


class _Place(NamedTuple):
    digest: str
    offset: int
    alone: bool
    """Nothing else is in the chunk."""


_Spans = Mapping[_Span, _Place]


def pieces_of(
    layout: Layout, working: Callable[[], object] = lambda: None
) -> Mapping[str, Sequence[tuple[int, Piece]]]:
    """By tensor, its pieces and the rank of each. Of a box that several ranks stored the first rank's is taken, as a
    restore does. `working` is called for each rank."""
    found: dict[str, dict[Box, tuple[int, Piece]]] = defaultdict(dict)
    for rank, shard in enumerate(layout.shards):
        working()
        for piece in shard.pieces:
            found[piece.tensor].setdefault((piece.offsets, piece.shape), (rank, piece))
    return {name: list(pieces.values()) for name, pieces in found.items()}


def _spans(stored: StoredTensors, pieces: Mapping[str, Sequence[tuple[int, Piece]]], name: str) -> _Spans:
    """Of one tensor. One without elements may have no piece."""
    spans: dict[_Span, _Place] = {}
    entry = stored.layout.tensors[name]
    for rank, piece in pieces.get(name, ()):
        digests, sizes = stored.chunks[rank], stored.layout.shards[rank].chunks
        box, start = begin_of(piece, entry)
        for ordinal, offset, size in piece.segments:
            spans[_Span(box, start, size)] = _Place(digests[ordinal], offset, alone=size == sizes[ordinal])
            start += size
    return spans


def begin_of(piece: Piece, entry: TensorEntry) -> tuple[Box | None, int]:
    """None, and the first byte of the piece in the tensor; or the box, if it is no one run of the tensor's bytes. A box
    is one run of the tensor's bytes if each axis after its first one of several elements is whole."""
    if piece.shape == entry.shape:
        return None, 0
    first = next((axis for axis, size in enumerate(piece.shape) if size != 1), len(piece.shape))
    if piece.shape[first + 1 :] != entry.shape[first + 1 :]:
        return (piece.offsets, piece.shape), 0
    elements = 0
    for offset, size in zip(piece.offsets, entry.shape, strict=True):
        elements = elements * size + offset
    return None, elements * ITEM_BYTES[entry.dtype]


def _verdict(ours: _Spans, theirs: _Spans) -> Literal["other_bytes", "undecided", "cut_differently", "equal"]:
    places = [(ours[span], theirs[span]) for span in ours.keys() & theirs.keys()]
    if any(one.alone and other.alone and one.digest != other.digest for one, other in places):
        return "other_bytes"
    if not len(places) == len(ours) == len(theirs):
        return "cut_differently"
    return "equal" if all(one == other for one, other in places) else "undecided"
