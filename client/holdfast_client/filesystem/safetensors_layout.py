"""The tensors of a checkpoint as safetensors files: their headers, and which bytes of a file lie where in which chunk.

Flow: layout -> **files** -> the parts of a range -> verified chunks -> bytes. Pure, without torch and numpy.

The file of a component holds each of its tensors whole, row-major, whatever ranks stored the pieces. Tensors lie in the
order of their chunks, so that who reads a file from its beginning to its end needs each chunk once. Those of larger
elements come first, as safetensors itself sorts them: every tensor is aligned. The format has no ties: one name of tied
tensors is kept, and the metadata maps the others to it, as `holdfast checkpoints pull` does.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from holdfast_client.errors import IntegrityError
from holdfast_client.filesystem.places import SUFFIX
from holdfast_protocol.index_documents import ITEM_BYTES, Box, Layout, Piece, TensorEntry

FORMAT_NAMES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""The dtypes that safetensors 0.8 reads back as what they were, by torch's names."""

_UNIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(@\d{1,6})?")
_HEADER_ALIGNMENT = 8
_METADATA = "__metadata__"


class ChunkPlace(NamedTuple):
    """A chunk of a checkpoint: the rank that stored it, and its ordinal there."""

    rank: int
    ordinal: int


class Copy(NamedTuple):
    """`bytes` bytes at `offset` of a chunk are those at `at` of the file."""

    offset: int
    at: int
    bytes: int


class _Runs(NamedTuple):
    """A box of a tensor as runs of consecutive bytes, in their order. Sizes in bytes, but for `shape`."""

    first: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def begin(self, number: int) -> int:
        """Where a run begins in the tensor. Grows with the number."""
        at = self.first
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            number, index = divmod(number, size)
            at += index * stride
        return at

    @classmethod
    def of(cls, box: Box, entry: TensorEntry) -> _Runs:
        offsets, shape = box
        item = ITEM_BYTES[entry.dtype]
        strides = [item] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * entry.shape[axis + 1]
        whole = len(shape)  # from this axis on the box has all of the tensor
        while whole and shape[whole - 1] == entry.shape[whole - 1]:
            whole -= 1
        axis = max(0, whole - 1)
        return cls(
            first=sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)),
            bytes=prod(shape[axis:]) * item,
            shape=shape[:axis],
            strides=tuple(strides[:axis]),
        )


class Part(NamedTuple):
    """A segment of a stored piece: `bytes` bytes at `offset` of the chunk are those from `begin` on of the piece."""

    chunk: ChunkPlace
    offset: int
    begin: int
    bytes: int
    runs: _Runs
    tensor_at: int
    """Where the tensor begins in the file."""

    def copies(self, start: int, stop: int) -> Iterator[Copy]:
        """What of it lies in [start, stop) of the file."""
        runs, start, stop = self.runs, start - self.tensor_at, stop - self.tensor_at
        end = self.begin + self.bytes
        numbers = range(self.begin // runs.bytes, -(-end // runs.bytes))
        skipped = bisect_right(numbers, start, key=lambda number: runs.begin(number) + runs.bytes)
        for number in numbers[skipped:]:
            at, in_piece = runs.begin(number), number * runs.bytes
            if at >= stop:
                return
            first = max(in_piece, self.begin, in_piece + start - at)
            last = min(in_piece + runs.bytes, end, in_piece + stop - at)
            if first < last:
                yield Copy(self.offset + first - self.begin, self.tensor_at + at + first - in_piece, last - first)


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: [begin, end)."""

    name: str
    """The layout's: `model/up.weight`."""
    begin: int
    end: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class SafetensorsFile:
    name: str
    header: bytes
    """With its length before it: the file's first bytes."""
    tensors: tuple[FileTensor, ...]
    """In their order, without gaps. The first begins where the header ends."""

    @property
    def bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else len(self.header)

    def between(self, start: int, stop: int) -> Iterator[FileTensor]:
        """The tensors with bytes in [start, stop)."""
        first = bisect_right(self.tensors, start, key=lambda tensor: tensor.end)
        for tensor in self.tensors[first:]:
            if tensor.begin >= stop:
                return
            if tensor.begin < tensor.end:
                yield tensor

    def parts(self, start: int, stop: int) -> Mapping[ChunkPlace, list[Part]]:
        """Of [start, stop), by the chunk that must be read for them. A chunk with no byte of the range is left out."""
        found: dict[ChunkPlace, list[Part]] = defaultdict(list)
        for tensor in self.between(start, stop):
            for part in tensor.parts:
                if next(part.copies(start, stop), None) is not None:
                    found[part.chunk].append(part)
        return found


class NotInSafetensorsError(ValueError):
    """safetensors has no form for a tensor."""


def file_names(layout: Layout, *, is_dcp: bool) -> dict[str, list[str]]:
    """The tensors of each file, by the layout's names. `is_dcp`: the whole content of a dcp.save, which has no
    components. Raises IntegrityError for a component with a name that no file can have."""
    if is_dcp:
        return {f"dcp{SUFFIX}": sorted(layout.tensors)} if layout.tensors else {}
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(layout.tensors):
        unit = name.partition("/")[0]
        if not _UNIT_NAME.fullmatch(unit):
            raise IntegrityError(f"The checkpoint has a component with the unusable name {unit[:80]!r}")
        found[unit + SUFFIX].append(name)
    return dict(found)


def safetensors_file(layout: Layout, file: str, names: Iterable[str], *, is_dcp: bool) -> SafetensorsFile:
    """Raises NotInSafetensorsError with the first tensor whose dtype the format lacks, or whose name in the file is
    another one's."""
    unit = file.removesuffix(SUFFIX)

    def key_of(name: str) -> str:
        return name if is_dcp else name.partition("/")[2] or unit

    names = list(names)
    by_key: dict[str, str] = {}
    for name in names:
        if layout.tensors[name].dtype not in FORMAT_NAMES:
            raise NotInSafetensorsError(f"safetensors cannot hold {name!r}, which is {layout.tensors[name].dtype}")
        if key_of(name) == _METADATA:
            raise NotInSafetensorsError(f"safetensors keeps the name {_METADATA!r} for itself, and {name!r} has it")
        if (other := by_key.setdefault(key_of(name), name)) != name:
            raise NotInSafetensorsError(f"{other!r} and {name!r} would both be {key_of(name)!r} in it")
    here = frozenset(names)
    tied_to = {name: layout.tensors[name].alias_of for name in names}
    # What is tied to a tensor of another component is stored there, and whole in this file all the same.
    stored = {name: layout.tensors[name] for name in names if tied_to[name] not in here}
    ties = {key_of(name): key_of(tied) for name, tied in tied_to.items() if tied in here and tied is not None}
    by_source = _pieces(layout, {tied_to[name] or name for name in stored})
    pieces = {name: by_source[tied_to[name] or name] for name in stored}
    ordered = sorted(stored, key=lambda name: (-ITEM_BYTES[stored[name].dtype], _first(pieces[name]), name))
    at = 0
    described: dict[str, object] = {_METADATA: {"format": "pt", **ties}}
    for name in ordered:
        entry, end = stored[name], at + stored[name].total_bytes
        form = {"dtype": FORMAT_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [at, end]}
        described[key_of(name)] = form
        at = end
    header = _header(described)
    at = len(header)
    tensors = []
    for name in ordered:
        entry = stored[name]
        parts = tuple(part for rank, piece in pieces[name] for part in _parts(rank, piece, entry, at))
        tensors.append(FileTensor(name, at, at + entry.total_bytes, parts))
        at += entry.total_bytes
    return SafetensorsFile(file, header, tuple(tensors))


def _pieces(layout: Layout, wanted: Collection[str]) -> Mapping[str, list[tuple[int, Piece]]]:
    """Of a box that several ranks stored the first rank's, as a restore takes it."""
    found: dict[str, dict[Box, tuple[int, Piece]]] = {name: {} for name in wanted}
    for rank, shard in enumerate(layout.shards):
        for piece in shard.pieces:
            if piece.tensor in wanted and 0 not in piece.shape:
                found[piece.tensor].setdefault((piece.offsets, piece.shape), (rank, piece))
    return {name: list(boxes.values()) for name, boxes in found.items()}


def _first(pieces: list[tuple[int, Piece]]) -> tuple[int, int, int]:
    return min(((rank, *piece.segments[0][:2]) for rank, piece in pieces), default=(0, 0, 0))


def _parts(rank: int, piece: Piece, entry: TensorEntry, tensor_at: int) -> Iterator[Part]:
    runs = _Runs.of((piece.offsets, piece.shape), entry)
    begin = 0
    for segment in piece.segments:
        yield Part(ChunkPlace(rank, segment.ordinal), segment.offset, begin, segment.bytes, runs, tensor_at)
        begin += segment.bytes


def _header(described: Mapping[str, object]) -> bytes:
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
