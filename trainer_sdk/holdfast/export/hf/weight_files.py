"""Safetensors files of a bounded size, written chunk by chunk: no tensor is ever whole in memory.

    plan_files(): which tensor at which byte of which file -> heads are written, files get their length
    write_files(): each chunk is fetched once, verified -> WeightFile place -> cast -> pwrite

The place of each byte is known before the first chunk arrives, because safetensors is a JSON head and then the tensors'
row-major bytes without gaps. Chunks come in the order of the store: a rank's shard of each tensor, packs of small ones.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.export.contents import Contents
from holdfast.layout.reshard import Read, ReadPlan, WantedPiece, items_of, plan_reads
from holdfast.restore.checkpoint_reader import CheckpointSource, chunk_sizes
from holdfast.state.tensors import torch_dtype
from holdfast_client.errors import ConfigurationError
from holdfast_client.filesystem.safetensors_layout import FORMAT_NAMES
from holdfast_protocol.index_documents import ITEM_BYTES

INDEX = "model.safetensors.index.json"
MOST_FILES = 500
"""All are open while they are written, and many systems let a process have 1024 open."""
_ALIGNED_BYTES = 8
_RESERVED = "__metadata__"

SAFETENSORS_DTYPES: Mapping[str, str] = {**FORMAT_NAMES, "float8_e8m0fnu": "F8_E8M0"}
"""By torch's names. An older safetensors lacks some: `check_dtypes` asks the one that is installed."""


class Weight(NamedTuple):
    """One tensor of a file. `dtype` is that of the file; the checkpoint may have another."""

    name: str
    stored: str
    """Its name in the layout."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightFile:
    name: str
    head: bytes
    starts: Mapping[str, int]
    """Name of each tensor -> where its bytes begin."""
    bytes: int
    """Of the whole file."""


@dataclass(frozen=True)
class WeightFiles:
    files: tuple[WeightFile, ...]
    weights: Mapping[str, Weight]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def index(self) -> dict[str, Any] | None:
        """The content of the index, as transformers writes it; None for a single file."""
        if len(self.files) == 1:
            return None
        return {
            "metadata": {
                "total_parameters": sum(prod(weight.shape) for weight in self.weights.values()),
                "total_size": sum(weight.bytes for weight in self.weights.values()),
            },
            "weight_map": {name: file.name for file in self.files for name in file.starts},
        }


def plan_files(weights: Sequence[Weight], most_bytes: int, ties: Mapping[str, str]) -> WeightFiles:
    """In the order of `weights`, a new file as soon as the tensors of one would have more than `most_bytes`; a larger
    tensor has a file of its own. `ties`: name -> the tensor with its bytes, noted in that one's file.

    Raises ConfigurationError for a size that would make too many files, and for a name that the format keeps for
    itself."""
    if any(weight.name == _RESERVED for weight in weights):
        raise ConfigurationError(f"safetensors keeps the name {_RESERVED!r} for itself. Rename that tensor.")
    groups: list[list[Weight]] = []
    room = 0
    for weight in weights:
        if not groups or weight.bytes > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(weight)
        room -= weight.bytes
    if len(groups) > MOST_FILES:
        total = sum(weight.bytes for weight in weights)
        raise ConfigurationError(
            f"These would be {len(groups)} files, and {MOST_FILES} are the most. The weights have "
            f"{total / 10**9:.1f} GB: give a larger --max-file-size."
        )
    files = tuple(
        _planned(
            "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors",
            group,
            {name: kept for name, kept in ties.items() if kept in {weight.name for weight in group}},
        )
        for number, group in enumerate(groups, start=1)
    )
    return WeightFiles(files, {weight.name: weight for weight in weights})


def _planned(name: str, weights: Sequence[Weight], ties: Mapping[str, str]) -> WeightFile:
    # The wide ones first, as safetensors itself has it: then each begins at a multiple of its item.
    ordered = sorted(weights, key=lambda weight: (-ITEM_BYTES[weight.dtype], weight.name))
    described: dict[str, Any] = {_RESERVED: {"format": "pt", **ties}}
    begins: dict[str, int] = {}
    end = 0
    for weight in ordered:
        begins[weight.name] = end
        end += weight.bytes
        described[weight.name] = {
            "dtype": SAFETENSORS_DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [begins[weight.name], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    head = len(text).to_bytes(8, "little") + text
    return WeightFile(name, head, {name: len(head) + begin for name, begin in begins.items()}, len(head) + end)


def plan_chunks(contents: Contents, files: WeightFiles) -> ReadPlan:
    """What is read of each chunk. The name of a read is the layout's."""
    entries = contents.layout.tensors
    wanted = (
        WantedPiece(weight.stored, entries[weight.stored].dtype, (0,) * len(weight.shape), weight.shape)
        for weight in files.weights.values()
    )
    return plan_reads(contents.layout, wanted)


def bytes_to_fetch(contents: Contents, reads: ReadPlan) -> int:
    return sum(chunk_sizes(reads, contents.layout, contents.chunks).values())


def write_files(
    source: CheckpointSource,
    contents: Contents,
    files: WeightFiles,
    reads: ReadPlan,
    *,
    folder: Path,
    on_bytes: Callable[[int], object],
) -> tuple[list[str], list[str]]:
    """The files' names, and the names of the tensors with finite values that became infinite. The files are on the disk
    when this returns. Raises ChunkLost if no copy has the right bytes."""
    lock = threading.Lock()

    def fetched(count: int) -> None:
        with lock:
            on_bytes(count)

    with ExitStack() as stack:
        rooms: dict[str, InFile] = {}
        descriptors = []
        for file in files.files:
            descriptor = stack.enter_context(_opened(folder / file.name))
            descriptors.append(descriptor)
            _write_at(descriptor, memoryview(file.head), 0)
            os.truncate(descriptor, file.bytes)
            for name, start in file.starts.items():
                weight = files.weights[name]
                rooms[weight.stored] = InFile(
                    descriptor, start, contents.layout.tensors[weight.stored].dtype, weight.dtype
                )
        source.read(reads, contents.layout, contents.chunks, rooms, on_bytes=fetched)
        for descriptor in descriptors:
            os.fsync(descriptor)
    overflown = [weight.name for weight in files.weights.values() if rooms[weight.stored].has_overflown]
    return [file.name for file in files.files], overflown


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class InFile:
    """A tensor's place in a file. Several threads may use it at once: reads of one plan never overlap."""

    def __init__(self, descriptor: int, start: int, stored: str, written: str) -> None:
        self._descriptor = descriptor
        self._start = start
        self._cast = None if stored == written else (torch_dtype(stored), torch_dtype(written))
        self._item_bytes = ITEM_BYTES[written]
        self.has_overflown = False
        """A finite value was too large for the dtype of the file."""

    def take(self, read: Read, chunk: memoryview) -> None:
        """Writes `read`'s elements. Raises ValueError if the read does not fit the chunk, OSError as the disk does."""
        source = items_of(chunk, read.chunk_offset, read.shape, read.chunk_strides, read.item_bytes)
        content = self._as_written(source)
        for at, run in _runs(read):
            begin = run.start * self._item_bytes
            end = run.stop * self._item_bytes
            _write_at(self._descriptor, content[begin:end], self._start + at * self._item_bytes)

    def _as_written(self, source: np.ndarray[Any, Any]) -> memoryview:
        """The bytes of the elements, one after another."""
        plain: np.ndarray[Any, Any] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        if self._cast is None:
            return plain.data
        stored, written = self._cast
        if plain.ctypes.data % stored.itemsize:  # a place within a pack of several dtypes
            plain = plain.copy()
        values = torch.from_numpy(plain).view(stored)
        cast = values.to(written)
        if cast.isinf().sum() > values.isinf().sum():
            self.has_overflown = True
        content: np.ndarray[Any, Any] = cast.view(torch.uint8).numpy()
        return content.data


def _runs(read: Read) -> Iterator[tuple[int, range]]:
    """The parts of a read that lie together in the tensor: where, and which of the read's elements; in elements."""
    inner, length = len(read.shape), 1
    while inner and (read.shape[inner - 1] == 1 or read.destination_strides[inner - 1] == length * read.item_bytes):
        inner -= 1
        length *= read.shape[inner]
    first = read.destination_offset // read.item_bytes
    strides = [stride // read.item_bytes for stride in read.destination_strides[:inner]]
    for number, place in enumerate(product(*map(range, read.shape[:inner]))):
        at = first + sum(index * stride for index, stride in zip(place, strides, strict=True))
        yield at, range(number * length, (number + 1) * length)


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content.nbytes:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
