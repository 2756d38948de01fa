"""The index: which tensor piece is in which bytes of which chunk. Two documents, both compressed canonical JSON.

The planner builds a Layout once per plan (global, no digests, the same object for every step with that plan). Each save
writes one ShardIndex per rank, which names its layout and holds the typed trees. A restore reads the two, plans its
reads and never unpickles. The third part, each shard's list of chunk digests, is in the catalog.

Layout:     {"format": "holdfast-layout-1", "world_size": N,
             "tensors": {name: {"component", "dtype", "shape", "replicated", "alias_of"?}},
             "shards": [{"chunks": [bytes per ordinal],
                         "pieces": [[tensor, offsets, shape, [[ordinal, chunk offset, bytes], …]], …]} per rank]}
            where `tensor` is the position of the tensor's name among the sorted names.
            Each tensor is whole, each of its elements once; segments lie in their chunks and do not overlap. So a
            reader's cost is bounded by the bytes of the layout's chunks.
ShardIndex: {"format": "holdfast-shard-3", "run": "project/run", "step": s, "world_size": N, "rank": r,
             "layout_digest": …, "trees": {component: typed tree}, "replicated_trees": {component: typed tree},
             "rng": typed tree or null}

Each rank's index names its save. The seal signs it with the rest of the shard, so every reader detects a catalog that
gives a checkpoint another step or another run (rule index-names-its-save). The layout names none, because one layout
serves all the steps of a plan.

A reader refuses a format with a higher number than its own, and takes whatever else it does not know for damage. So a
new field, dtype or tag of a typed tree needs the next number. Number 3 brought tensor subclasses, and an index without
them is still written with number 2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, Self

from holdfast_protocol.digests import (
    MAX_DOCUMENT_BYTES,
    DocumentError,
    NewerDocumentError,
    canonical_bytes,
    chunk_digest,
    compress,
    decompress,
    parse,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, in elements."""

_FACES_PER_BOX = 64
"""Six dimensions that are all cut, in the worst way. A grid, however fine, needs four."""


def tiles(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether the boxes, which lie within the shape, cover it and do not overlap. The same box may come twice: several
    ranks stored it. False also for boxes that are cut in so many dimensions that the check would take long. Pure,
    linear in the number of boxes.

    A restore refuses holes and overlapping boxes, because it counts the bytes that its reads fill. So no checkpoint is
    written or believed that has either.
    """
    filled = {box for box in boxes if prod(box[1])}
    if prod(shape) == 0:
        return True
    if sum(prod(size) for _, size in filled) != prod(shape):
        return False
    cut = [axis for axis, whole in enumerate(shape) if any(size[axis] != whole for _, size in filled)]
    if len(cut) == 1:  # as nearly every sharding does: end to end
        spans = sorted((offsets[cut[0]], size[cut[0]]) for offsets, size in filled)
        return all(begin + length == following for (begin, length), (following, _) in pairwise(spans))
    return _cancels(shape, filled, cut)


def _cancels(shape: tuple[int, ...], filled: set[Box], cut: list[int]) -> bool:
    """Whether the boxes' corners, taken with alternating signs, are those of the whole: only then is the sum of the
    boxes the whole. Dimension by dimension, so that the faces where two boxes meet cancel at once.
    """
    faces: Counter[Box] = Counter(filled)
    faces[(0,) * len(shape), shape] -= 1
    for axis in cut:
        met: Counter[Box] = Counter()
        for (offsets, size), sign in faces.items():
            flat = (*size[:axis], shape[axis], *size[axis + 1 :])
            begin, end = offsets[axis], offsets[axis] + size[axis]
            met[(*offsets[:axis], begin, *offsets[axis + 1 :]), flat] += sign
            met[(*offsets[:axis], end, *offsets[axis + 1 :]), flat] -= sign
        faces = Counter({face: sign for face, sign in met.items() if sign})
        if len(faces) > _FACES_PER_BOX * len(filled):
            return False
    return not any(faces.values())


_SHOWN = 300
"""Letters of a message: names in a hostile document may be long."""

LAYOUT_FORMAT = "holdfast-layout-1"
SHARD_FORMAT = "holdfast-shard-3"
_OLDER_SHARD_FORMAT = "holdfast-shard-2"
"""Of documents without tensor subclasses, which older readers still take."""
_WRAPPED = b'{"wrapped":'
"""The tag of a tensor subclass. Within a value its quotes would be escaped."""

MAX_DIMENSIONS = 64
"""As torch's own limit."""
MAX_SIZE = 2**62
"""Sizes and numbers of bytes in a layout stay below it, so that every reader can count the sum of two."""

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Every dtype that a chunk can hold, and the bytes of one element. Names are torch's, without `torch.`."""


class TensorEntry(NamedTuple):
    """One tensor of the checkpoint, whatever ranks hold its pieces. `alias_of` names the tensor it is tied to."""

    component: str
    dtype: str
    shape: tuple[int, ...]
    replicated: bool
    alias_of: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Segment(NamedTuple):
    """`bytes` consecutive bytes of a piece at `offset` in chunk `ordinal`; a piece's segments are row-major."""

    ordinal: int
    offset: int
    bytes: int


class Piece(NamedTuple):
    """A box of a tensor that one rank stored, row-major: `offsets` and `shape` in elements of the global tensor."""

    tensor: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]


class ShardLayout(NamedTuple):
    """One rank's share: the size of each of its chunks in bytes, by ordinal, and the pieces in them."""

    chunks: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """The global layout. Equal layouts have equal digests, whichever rank built them."""

    world_size: int
    tensors: Mapping[str, TensorEntry]
    shards: tuple[ShardLayout, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, each once, tied ones not counted again."""
        return sum(entry.total_bytes for entry in self.tensors.values() if entry.alias_of is None)

    def torn(self) -> str | None:
        """The first tensor that its pieces do not make whole, each element once; None if there is none. A tied one is
        whole if its target is."""
        boxes: dict[str, set[Box]] = {name: set() for name, entry in self.tensors.items() if entry.alias_of is None}
        for shard in self.shards:
            for piece in shard.pieces:
                boxes[piece.tensor].add((piece.offsets, piece.shape))
        return next((name for name, found in boxes.items() if not tiles(self.tensors[name].shape, found)), None)

    @cached_property
    def canonical(self) -> bytes:
        """Canonical JSON, not compressed."""
        position = {name: at for at, name in enumerate(sorted(self.tensors))}
        return canonical_bytes(
            {
                "format": LAYOUT_FORMAT,
                "world_size": self.world_size,
                "tensors": {name: _tensor_document(entry) for name, entry in self.tensors.items()},
                "shards": [
                    {
                        "chunks": shard.chunks,
                        "pieces": [(position[p.tensor], p.offsets, p.shape, p.segments) for p in shard.pieces],
                    }
                    for shard in self.shards
                ],
            }
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: what ShardIndex.layout_digest names, on every zlib build."""
        return chunk_digest(self.canonical)

    def encode(self) -> bytes:
        """The bytes of the layout's chunk. Raises DocumentError above MAX_DOCUMENT_BYTES."""
        return compress(self.canonical)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Self:
        """The inverse of encode. Raises DocumentError unless each tensor is whole, each piece lies in its tensor, and
        no two pieces share bytes of a chunk; NewerDocumentError for a newer format. Linear in the document; it
        allocates nothing by the document's numbers."""
        document = _open(data, LAYOUT_FORMAT, {"world_size", "tensors", "shards"}, max_bytes)
        try:
            tensors = {name: _read_tensor(name, entry) for name, entry in document["tensors"].items()}
            names = sorted(tensors)
            shards = tuple(_read_shard(shard, names, tensors) for shard in document["shards"])
            layout = cls(world_size=_count(document["world_size"]), tensors=tensors, shards=shards)
            _check_layout(layout)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise DocumentError(f"this layout is malformed: {str(error)[:_SHOWN]}") from error
        return layout


class SavedAs(NamedTuple):
    """The save that a document belongs to, for messages: `run` is `project/run`."""

    run: str
    step: int
    world_size: int

    def __str__(self) -> str:
        return f"step {self.step} of {self.run}, saved by {self.world_size} ranks"


@dataclass(frozen=True)
class ShardIndex:
    """One rank's save beside its tensors. Trees are in the encoded form of the typed tree (plain JSON values)."""

    saved_as: SavedAs
    rank: int
    layout_digest: str
    trees: Mapping[str, Any] = field(default_factory=dict)
    """Per component, as on this rank."""
    replicated_trees: Mapping[str, Any] = field(default_factory=dict)
    """Per component, the same on all ranks: written by rank 0 only, empty in the others' documents."""
    rng: Any = None

    @cached_property
    def canonical(self) -> bytes:
        """Canonical JSON, not compressed."""
        document = {
            "format": _OLDER_SHARD_FORMAT,
            **self.saved_as._asdict(),
            "rank": self.rank,
            "layout_digest": self.layout_digest,
            "trees": dict(self.trees),
            "replicated_trees": dict(self.replicated_trees),
            "rng": self.rng,
        }
        encoded = canonical_bytes(document)
        return canonical_bytes(document | {"format": SHARD_FORMAT}) if _WRAPPED in encoded else encoded

    def encode(self) -> bytes:
        """The bytes of the index's chunk. Raises DocumentError above MAX_DOCUMENT_BYTES."""
        return compress(self.canonical)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Self:
        """The inverse of encode. The trees stay encoded, and their decoder checks them. Raises as a layout's does."""
        fields = {*SavedAs._fields, "rank", "layout_digest", "trees", "replicated_trees", "rng"}
        document = _open(data, SHARD_FORMAT, fields, max_bytes, older=_OLDER_SHARD_FORMAT)
        try:
            saved_as = SavedAs(document["run"], _count(document["step"]), _count(document["world_size"]))
            rank = _count(document["rank"])
            digest = document["layout_digest"]
            trees, replicated = document["trees"], document["replicated_trees"]
            if not (isinstance(saved_as.run, str) and isinstance(digest, str)):
                raise TypeError("run and layout_digest must be text")
            if not (isinstance(trees, dict) and isinstance(replicated, dict)):
                raise TypeError("trees and replicated_trees must be objects")
        except (TypeError, ValueError) as error:
            raise DocumentError(f"this shard index is malformed: {str(error)[:_SHOWN]}") from error
        return cls(saved_as, rank, digest, trees=trees, replicated_trees=replicated, rng=document["rng"])


def _open(
    data: bytes | bytearray | memoryview, expected: str, fields: set[str], max_bytes: int, *, older: str | None = None
) -> dict[str, Any]:
    document = parse(decompress(data, max_bytes=max_bytes))
    if not isinstance(document, dict):
        raise DocumentError("an index document is a JSON object, and this is none")
    found = document.get("format")
    if _is_newer(found, expected):
        raise NewerDocumentError(f"its format is {found}, and this holdfast reads {expected}")
    if found not in (expected, older) or found is None:
        raise DocumentError(f"this is not a {expected} document but {str(found)[:80]!r}")
    if document.keys() != fields | {"format"}:
        raise DocumentError(f"a {expected} document has exactly the fields {sorted(fields)}")
    return document


def _is_newer(found: Any, known: str) -> bool:
    kind, _, number = known.rpartition("-")
    told = re.fullmatch(rf"{kind}-([1-9][0-9]{{0,3}})", found) if isinstance(found, str) else None
    return told is not None and int(told[1]) > int(number)


def _tensor_document(entry: TensorEntry) -> dict[str, Any]:
    document: dict[str, Any] = entry._asdict()
    if entry.alias_of is None:
        del document["alias_of"]
    return document


def _read_tensor(name: str, document: Mapping[str, Any]) -> TensorEntry:
    entry = TensorEntry(
        component=document["component"],
        dtype=document["dtype"],
        shape=_counts(document["shape"]),
        replicated=document["replicated"],
        alias_of=document.get("alias_of"),
    )
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {str(entry.dtype)[:80]!r}")
    if len(entry.shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {len(entry.shape)} dimensions, and torch knows {MAX_DIMENSIONS}")
    if entry.total_bytes >= MAX_SIZE:
        raise ValueError(f"tensor {name!r} is larger than anything that can be stored")
    if not (isinstance(entry.component, str) and isinstance(entry.replicated, bool)):
        raise TypeError(f"tensor {name!r} needs a component name and replicated true or false")
    return entry


def _read_shard(document: Mapping[str, Any], names: list[str], tensors: Mapping[str, TensorEntry]) -> ShardLayout:
    chunks = _counts(document["chunks"])
    pieces = []
    for at, offsets, shape, segments in document["pieces"]:
        name = names[_count(at)]
        piece = Piece(name, _counts(offsets), _counts(shape), tuple(Segment(*_counts(s)) for s in segments))
        _check_piece(piece, tensors[name], chunks)
        pieces.append(piece)
    _check_apart(pieces)
    return ShardLayout(chunks, tuple(pieces))


def _check_piece(piece: Piece, entry: TensorEntry, chunks: tuple[int, ...]) -> None:
    item_bytes = ITEM_BYTES[entry.dtype]
    if entry.alias_of is not None:
        raise ValueError(f"{piece.tensor!r} is tied to {entry.alias_of!r} and has a piece of its own")
    if not len(piece.offsets) == len(piece.shape) == len(entry.shape):
        raise ValueError(f"a piece of {piece.tensor!r} has other dimensions than the tensor")
    if any(o + s > whole for o, s, whole in zip(piece.offsets, piece.shape, entry.shape, strict=True)):
        raise ValueError(f"a piece of {piece.tensor!r} lies outside the tensor")
    if not piece.segments or any(segment.bytes == 0 or segment.bytes % item_bytes for segment in piece.segments):
        raise ValueError(f"a piece of {piece.tensor!r} is empty, or cut inside an element")
    if sum(segment.bytes for segment in piece.segments) != prod(piece.shape) * item_bytes:
        raise ValueError(f"the segments of a piece of {piece.tensor!r} do not add up to its bytes")
    if any(segment.offset + segment.bytes > chunks[segment.ordinal] for segment in piece.segments):
        raise ValueError(f"a segment of {piece.tensor!r} lies outside its chunk")


def _check_apart(pieces: list[Piece]) -> None:
    """Raises ValueError if two segments of a shard share bytes: pieces could then outnumber the bytes."""
    segments = sorted(segment for piece in pieces for segment in piece.segments)
    for one, following in pairwise(segments):
        if one.ordinal == following.ordinal and one.offset + one.bytes > following.offset:
            raise ValueError(f"two pieces lie in the same bytes of chunk {one.ordinal}")


def _check_layout(layout: Layout) -> None:
    if layout.world_size < 1 or len(layout.shards) != layout.world_size:
        raise ValueError(f"world size {layout.world_size} and {len(layout.shards)} shards do not agree")
    for name, entry in layout.tensors.items():
        if entry.alias_of is None:
            continue
        target = layout.tensors[entry.alias_of]
        if target.alias_of is not None or (target.dtype, target.shape) != (entry.dtype, entry.shape):
            raise ValueError(f"{name!r} is tied to {entry.alias_of!r}, which is another tie or differs from it")
    if (torn := layout.torn()) is not None:
        raise ValueError(f"the pieces of tensor {torn!r} do not make it whole, each element once")


def _count(value: Any, most: int = MAX_SIZE) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:80]} is not a count")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise TypeError("a list of counts was expected")
    return tuple([_count(value, MAX_SIZE - 1) for value in values])
