"""A chunk's stored form -> its raw bytes, block by block, in bounded memory. Pure. The format is docs/codecs.md.

Nothing here proves anything: whoever decodes hashes what comes out and compares it with the chunk's digest. A frame
that was made to grow ends at the chunk's size, and one that asks for much memory is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, cast

import zstandard

from holdfast_protocol.codecs import MAX_WINDOW_BYTES, Codec

Piece = bytes | bytearray | memoryview


class DecodeError(ValueError):
    """These bytes are not a chunk of that size in that codec. The message says in a few words why."""


def decode(codec: Codec, chunk_bytes: int, pieces: Iterator[Piece]) -> Iterator[memoryview]:
    """Yields the chunk's bytes, exactly `chunk_bytes` in all. A block is good until the next one is asked for, and so
    must each of `pieces` be, which are the stored bytes in any cut. Raises DecodeError, and what `pieces` raises."""
    if codec is Codec.RAW:
        raise ValueError("what is stored raw needs no decoding")
    frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(
        cast("IO[bytes]", _Source(pieces)),  # its types ask for a whole file; it only ever calls read
        read_across_frames=False,
    )
    ordered, block = bytearray(codec.block_bytes), bytearray(codec.block_bytes)
    done = 0
    while done < chunk_bytes:
        size = min(codec.block_bytes, chunk_bytes - done)
        _fill(frame, memoryview(ordered)[:size], done)
        yield memoryview(_from_planes(ordered, block, size, codec.planes))[:size]
        done += size
    if _read(frame, memoryview(bytearray(1))):
        raise DecodeError(f"there are more than its {chunk_bytes} bytes in it")


class _Source:
    """What the decompressor reads from. It takes pieces of any size, whatever it asked for."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._pieces = pieces

    def read(self, _size: int = -1) -> Piece:
        return next(self._pieces, b"")


def _fill(frame: zstandard.ZstdDecompressionReader, into: memoryview, done: int) -> None:
    filled = 0
    while filled < into.nbytes:
        count = _read(frame, into[filled:])
        if not count:
            raise DecodeError(f"it ends after {done + filled} of the chunk's bytes")
        filled += count


def _read(frame: zstandard.ZstdDecompressionReader, into: memoryview) -> int:
    try:
        return frame.readinto(into)
    except zstandard.ZstdError as error:
        raise DecodeError(f"it is not a frame that can be decoded ({error})") from None


def _from_planes(ordered: bytearray, block: bytearray, size: int, planes: int) -> bytearray:
    """`block` with the bytes of `ordered` back in their places; `ordered` itself where nothing was moved."""
    if planes == 1:
        return ordered
    items = size // planes
    whole = items * planes
    for plane in range(planes if items else 0):  # an empty slice would be taken for a deletion
        block[plane:whole:planes] = memoryview(ordered)[plane * items : (plane + 1) * items]
    block[whole:size] = memoryview(ordered)[whole:size]
    return block
