"""Two checkpoints side by side: what the catalog knows of them, and their tensors, told by digests. No tensor is read.

    layout of each: which bytes of which chunk  +  chunk lists: the chunks' digests  ->  a verdict for each tensor
    indexes of each: the trees of the components                                      ->  which have other values

A digest is that of a whole chunk. Equal digests prove that all in the chunk is equal. Different digests prove that a
tensor differs only if it fills the chunk alone: of several tensors in one chunk, some may be equal all the same. Bytes
are compared by their place in the tensor, so it does not matter which rank stored them. What two saves have cut in
different places has no digests that could be compared (docs/adr/0081).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from holdfast_client.chunks.documents import CheckpointDocuments, ChunkLists
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import IntegrityError
from holdfast_protocol.attempts import CheckpointDiff
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.digests import canonical_bytes, chunk_digest
from holdfast_protocol.index_documents import ITEM_BYTES, Box, Layout, Piece, SavedAs, ShardIndex, TensorEntry


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


class Comparison(CheckpointDiff):
    """With the tensors and the other values, which the service does not know."""

    tensors: TensorDiff
    other_values: list[str]
    """The components whose values that are no tensors are other ones, or are in one checkpoint alone, sorted. What each
    rank has of its own is `loader@1`, and its random number generators are `rng@1`."""


@dataclass(frozen=True)
class StoredTensors:
    """The layout of one checkpoint, and the digests of the chunks that it speaks of."""

    layout: Layout
    chunks: ChunkLists
    values: Mapping[str, str] = field(default_factory=dict)
    """The digest of each component's tree: its values that are no tensors. Of a rank's own the name is `loader@1`, and
    of its random number generators `rng@1`."""


def compare(client: Client, before_id: str, after_id: str) -> Comparison:
    """Raises CheckpointNotFound for one that the caller may not see, and as `client.checkpoints.diff` does; ChunkLost,
    StoreUnavailable and IntegrityError if the documents of one cannot be read or do not belong together."""
    found = client.checkpoints.diff(before_id, after_id)
    with TransferWorkers() as workers:
        before, after = (read_tensors(client, view, workers) for view in (found.before, found.after))
    return Comparison(
        **dict(found),
        tensors=compare_tensors(before, after),
        other_values=sorted({name for name, _ in before.values.items() ^ after.values.items()}),
    )


def read_tensors(client: Client, view: CheckpointView, workers: TransferWorkers) -> StoredTensors:
    """Reads and proves the documents of a committed checkpoint."""
    saved_as = SavedAs(f"{view.project}/{view.run}", view.step, view.world_size)
    with CheckpointDocuments(client, view.id, saved_as, view.digest, workers=workers) as source:
        manifest = source.manifest()
        document, index = source.first_documents(manifest)
        layout = source.layout(manifest, document)
        indexes = {0: index, **source.indexes(manifest, range(1, view.world_size))}
        chunks = {rank: source.chunk_list(manifest, layout, rank) for rank in indexes}
    for rank, each in indexes.items():
        if each.layout_digest != layout.digest:
            raise IntegrityError(f"The index of rank {rank} in {view.id} names another layout")
    return StoredTensors(layout, chunks, tree_digests(dict(_trees(indexes))))


def tree_digests(trees: Mapping[str, Any]) -> dict[str, str]:
    return {name: chunk_digest(canonical_bytes(tree)) for name, tree in trees.items()}


def _trees(indexes: Mapping[int, ShardIndex]) -> Iterator[tuple[str, Any]]:
    yield from indexes[0].replicated_trees.items()
    for rank, index in indexes.items():
        yield from ((f"{name}@{rank}", tree) for name, tree in index.trees.items())
        if index.rng is not None:
            yield f"rng@{rank}", index.rng


def compare_tensors(before: StoredTensors, after: StoredTensors) -> TensorDiff:
    """Pure, linear in the pieces of both."""
    found = TensorDiff()
    ours, theirs = _spans(before), _spans(after)
    for name in sorted(before.layout.tensors.keys() | after.layout.tensors.keys()):
        one, other = before.layout.tensors.get(name), after.layout.tensors.get(name)
        if one is None:
            found.only_after.append(name)
        elif other is None:
            found.only_before.append(name)
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            found.other_form.append(OtherForm(name=name, before=_form(one), after=_form(other)))
        else:
            verdict = _verdict(ours[one.alias_of or name], theirs[other.alias_of or name])
            getattr(found, verdict).append(name)
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


def _spans(stored: StoredTensors) -> Mapping[str, _Spans]:
    """By tensor. Of a box that several ranks stored the first rank's is taken, as a restore does."""
    found: dict[str, dict[_Span, _Place]] = defaultdict(dict)
    seen: set[tuple[str, Box]] = set()
    for rank, shard in enumerate(stored.layout.shards):
        digests = stored.chunks[rank]
        for piece in shard.pieces:
            if (which := (piece.tensor, (piece.offsets, piece.shape))) in seen:
                continue
            seen.add(which)
            box, start = _begin(piece, stored.layout.tensors[piece.tensor])
            for ordinal, offset, size in piece.segments:
                place = _Place(digests[ordinal], offset, alone=size == shard.chunks[ordinal])
                found[piece.tensor][_Span(box, start, size)] = place
                start += size
    return found


def _begin(piece: Piece, entry: TensorEntry) -> tuple[Box | None, int]:
    """A box is one run of the tensor's bytes if each axis after its first one of several elements is whole."""
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
