"""Carry out one Read: verified chunk bytes -> the wanted piece's buffer. The last step before apply; numpy only.

Called from several threads at once: reads of one plan never overlap in their destination, and numpy copies without
the GIL.
"""

from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from holdfast.layout.reshard import Read

_OPAQUE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Copied as integers, so that no NaN payload can change; 16-byte elements as complex, which numpy moves bit by bit."""


class Elsewhere(Protocol):
    """A destination that is no host memory."""

    def take(self, read: Read, chunk: memoryview) -> None:
        """Has `read`'s elements when it returns."""


Room = memoryview | Elsewhere
"""Where a wanted piece's bytes go: all of them, row-major, as a 1-d byte buffer where they are host memory."""


def scatter(read: Read, chunk: memoryview, room: Room) -> None:
    """Copy `read`'s elements from the whole chunk's bytes into the whole piece's room.

    Raises ValueError when the read does not fit them: a hostile layout must not make a copy outside a buffer.
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
) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """A strided view of a byte buffer. Raises ValueError where it would reach outside."""
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + item_bytes
    if offset < 0 or any(stride < 0 for stride in strides) or offset + extent > buffer.nbytes:
        raise ValueError(f"a read of {extent} bytes at {offset} does not fit a buffer of {buffer.nbytes} bytes")
    flat = np.frombuffer(buffer, dtype=np.uint8, count=extent, offset=offset)
    item: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = flat[:item_bytes].view(_OPAQUE[item_bytes])
    return as_strided(item, shape=shape, strides=strides)
