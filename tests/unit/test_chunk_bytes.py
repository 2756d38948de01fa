"""Chunks that are made from tensors one after another: in the layout's places, and never two tensors at once."""

from __future__ import annotations

import tracemalloc
import weakref

import numpy as np

from holdfast.layout.chunk_bytes import Runs, chunks_of, same_bytes
from holdfast.layout.plan import ChunkSizes, place, whole


class Resolved(np.ndarray):
    """An array that can be referred to weakly."""


def test_each_tensor_is_resolved_once_and_dropped_before_the_next():
    specs = [
        whole("a", "model", "int16", (3,), replicated=True),
        whole("b", "model", "int64", (2,), replicated=True),
        whole("c", "model", "uint8", (200,), replicated=True),  # cut
    ]
    shard = place(specs, ChunkSizes(own_chunk_bytes=64, cut_bytes=64, pack_bytes=64))
    values = {spec.name: np.arange(1, spec.bytes + 1, dtype=np.uint8) for spec in specs}
    asked: list[str] = []
    last: list[weakref.ref] = []

    def resolve(piece):
        assert not last or last[-1]() is None, f"{asked[-1]} is held while {piece.tensor} is read"
        found = values[piece.tensor].copy().view(Resolved)
        asked.append(piece.tensor)
        last.append(weakref.ref(found))
        return Runs((found,))

    chunks = [bytes(chunk) for chunk in chunks_of(shard, resolve)]
    assert asked == ["a", "b", "c"]
    assert [len(chunk) for chunk in chunks] == list(shard.chunks)
    for piece in shard.pieces:
        read = b"".join(chunks[part.ordinal][part.offset : part.offset + part.bytes] for part in piece.segments)
        assert read == values[piece.tensor].tobytes()


def test_large_tensors_are_compared_to_their_last_byte_without_a_copy_of_their_size():
    size = 200 * 1024**2
    one, other = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    tracemalloc.start()
    try:
        assert same_bytes(Runs((one,)), 0, other)
        assert tracemalloc.get_traced_memory()[1] < size // 2
    finally:
        tracemalloc.stop()
    other[-1] = 1
    assert not same_bytes(Runs((one,)), 0, other)
    assert not same_bytes(Runs((one[:-1],)), 0, one)
