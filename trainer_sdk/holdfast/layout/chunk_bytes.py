"""The chunks of a shard, made one after another from tensors that are asked for when their turn comes.

Flow: plan -> **chunk bytes** -> hash -> upload. For saves that stage nothing: a tensor is resolved once and dropped
before the next one, so the memory is that of one tensor and of the chunks under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from holdfast_protocol.index_documents import Piece, Segment, ShardLayout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_COMPARED_BYTES = 64 * 1024**2
"""Compared at once: numpy makes an array of a byte for each."""


def chunks_of(shard: ShardLayout, resolve: Callable[[Piece], Bytes]) -> Iterator[memoryview]:
    """The shard's chunks by ordinal. `resolve` gives the row-major bytes of a piece."""
    parts: dict[int, list[tuple[Piece, int, Segment]]] = defaultdict(list)
    for piece in shard.pieces:
        start = 0
        for segment in piece.segments:
            parts[segment.ordinal].append((piece, start, segment))
            start += segment.bytes
    # The chunks of a cut tensor follow each other, so the last resolved tensor is often needed again.
    resolved: tuple[Piece, Bytes] | None = None
    for ordinal, size in enumerate(shard.chunks):
        chunk = np.zeros(size, dtype=np.uint8)
        for piece, start, segment in parts[ordinal]:
            if resolved is None or resolved[0] is not piece:
                resolved = None  # dropped first: there may be no room for two
                resolved = piece, resolve(piece)
            chunk[segment.offset : segment.offset + segment.bytes] = resolved[1][start : start + segment.bytes]
        yield chunk.data


def same_bytes(one: Bytes, other: Bytes) -> bool:
    return one.size == other.size and all(
        np.array_equal(one[start : start + _COMPARED_BYTES], other[start : start + _COMPARED_BYTES])
        for start in range(0, one.size, _COMPARED_BYTES)
    )
