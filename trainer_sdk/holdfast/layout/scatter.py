"""Carry out one Read: verified chunk bytes -> the wanted piece's buffer. The last step before apply; numpy only.

Called from several threads at once: reads of one plan never overlap in their destination, and numpy copies without
the GIL.
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided

from holdfast.layout.reshard import Read

_OPAQUE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Copied as integers, so that no NaN payload can change; 16-byte elements as complex, which numpy moves bit by bit."""


def scatter(read: Read, chunk: memoryview, destination: memoryview) -> None:
    """Copy `read`'s elements from the whole chunk's bytes into the whole destination's bytes (row-major).

    Both are 1-d byte buffers. Raises ValueError when the read does not fit them: a hostile layout must not make
    a copy outside a buffer.
    """
    if read.bytes == 0:
        return
    source = _view(chunk, read.chunk_offset, read.shape, read.chunk_strides, read.item_bytes)
    target = _view(destination, read.destination_offset, read.shape, read.destination_strides, read.item_bytes)
    target[...] = source


def _view(
    buffer: memoryview, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + item_bytes
    if offset < 0 or any(stride < 0 for stride in strides) or offset + extent > buffer.nbytes:
        raise ValueError(f"a read of {extent} bytes at {offset} does not fit a buffer of {buffer.nbytes} bytes")
    flat = np.frombuffer(buffer, dtype=np.uint8, count=extent, offset=offset)
    item: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = flat[:item_bytes].view(_OPAQUE[item_bytes])
    return as_strided(item, shape=shape, strides=strides)
