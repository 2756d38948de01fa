"""The chunks of a shard, made one after another from tensors that are asked for when their turn comes.

Flow: plan -> **chunk bytes** -> hash -> upload. For saves that stage nothing: a tensor is resolved once and dropped
before the next one, so the memory is that of one tensor and of the chunks under way. The bytes of a mapped file are
not even copied into a chunk: see `chunks_of`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast_protocol.index_documents import Piece, Segment, ShardLayout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_COMPARED_BYTES = 1024**2
"""Compared at once: numpy makes an array of a byte for each."""


@dataclass(frozen=True)
class Runs:
    """The row-major bytes of a tensor: arrays, one after another."""

    arrays: tuple[Bytes, ...]

    @property
    def bytes(self) -> int:
        return sum(each.size for each in self.arrays)

    def between(self, start: int, stop: int) -> Iterator[Bytes]:
        """[start, stop) of them, in place."""
        for each in self.arrays:
            if start < each.size and stop > 0:
                yield each[max(0, start) : stop]
            start, stop = start - each.size, stop - each.size


def chunks_of(shard: ShardLayout, resolve: Callable[[Piece], Runs], *, in_place: bool = False) -> Iterator[memoryview]:
    """The shard's chunks by ordinal. `resolve` gives the row-major bytes of a piece. `in_place`: they do not change,
    so a chunk that lies in one of their arrays is that part of it, and no copy."""
    parts: dict[int, list[tuple[Piece, int, Segment]]] = defaultdict(list)
    for piece in shard.pieces:
        start = 0
        for segment in piece.segments:
            parts[segment.ordinal].append((piece, start, segment))
            start += segment.bytes
    # The chunks of a cut tensor follow each other, so the last resolved tensor is often needed again.
    resolved: tuple[Piece, Runs] | None = None
    for ordinal, size in enumerate(shard.chunks):
        chunk: Bytes | None = None
        for piece, start, segment in parts[ordinal]:
            if resolved is None or resolved[0] is not piece:
                resolved = None  # dropped first: there may be no room for two
                resolved = piece, resolve(piece)
            chunk = _filled(chunk, size, resolved[1], start, segment, in_place=in_place)
        yield (np.zeros(size, dtype=np.uint8) if chunk is None else chunk).data


def _filled(
    chunk: Bytes | None, size: int, runs: Runs, start: int, segment: Segment, *, in_place: bool
) -> Bytes | None:
    """The chunk with the segment, which lies at `start` of the tensor's bytes. A function of its own, so that nothing
    refers to the tensor afterwards."""
    at = segment.offset
    for part in runs.between(start, start + segment.bytes):
        if in_place and part.size == size:
            return part
        chunk = np.zeros(size, dtype=np.uint8) if chunk is None else chunk
        chunk[at : at + part.size] = part
        at += part.size
    return chunk


def same_bytes(one: Runs, start: int, other: Bytes) -> bool:
    """Whether `other` is what `one` has from `start` on."""
    at = 0
    for part in one.between(start, start + other.size):
        for begin in range(0, part.size, _COMPARED_BYTES):
            block = part[begin : begin + _COMPARED_BYTES]
            if not np.array_equal(block, other[at : at + block.size]):
                return False
            at += block.size
    return at == other.size
