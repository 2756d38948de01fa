"""The codecs: forms of a chunk's bytes on the wire and in the store, in both directions. docs/codecs.md is the format.

The client picks a codec for a chunk -> encode -> PUT -> the copy's row keeps the codec -> GET -> decode. A chunk's
digest is always that of its raw bytes; the stored form may be smaller. Pure.

Planes are extended slices of small blocks, without numpy, so that the interpreter's lock is never held for long; the
compressor releases it. Decoding proves nothing: the caller hashes the result and compares it with the chunk's digest.
A frame that was made to grow ends at the chunk's size, and one that asks for much memory is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import IO, cast

import zstandard

PLANE_BYTES = 128 * 1024
"""Bytes of a whole block. A zstd block holds as much, so that each plane gets statistics of its own."""

MAX_WINDOW_BYTES = 8 * 1024**2
"""The window of a frame; a decoder needs no more memory than this and may refuse a frame that asks for more."""


class Codec(StrEnum):
    RAW = "raw"
    ZSTD = "zstd"
    ZSTD_SHUFFLE2 = "zstd-shuffle2"
    ZSTD_SHUFFLE4 = "zstd-shuffle4"
    ZSTD_SHUFFLE8 = "zstd-shuffle8"

    @property
    def planes(self) -> int:
        """Number of planes of a block: the size of an item in bytes; 1 if the order is kept."""
        return _PLANES[self]

    @property
    def block_bytes(self) -> int:
        """The chunk's bytes that are reordered at once; only the last block may be shorter."""
        return self.planes * PLANE_BYTES


_PLANES = {Codec.RAW: 1, Codec.ZSTD: 1, Codec.ZSTD_SHUFFLE2: 2, Codec.ZSTD_SHUFFLE4: 4, Codec.ZSTD_SHUFFLE8: 8}

_SINCE_MINOR = dict.fromkeys(Codec, 1) | {Codec.RAW: 0}


def zstd_codec(item_bytes: int) -> Codec:
    """For a chunk of numbers of `item_bytes` each; any size but 2, 4 and 8 keeps the order of its bytes."""
    shuffled = {2: Codec.ZSTD_SHUFFLE2, 4: Codec.ZSTD_SHUFFLE4, 8: Codec.ZSTD_SHUFFLE8}
    return shuffled.get(item_bytes, Codec.ZSTD)


def codecs_of_minor(protocol_minor: int) -> frozenset[Codec]:
    """The codecs that a client of this minor version of the protocol can decode."""
    return frozenset(codec for codec, since in _SINCE_MINOR.items() if since <= protocol_minor)


_LEVEL = 1

# A plane of a number's bytes has few repetitions and skewed byte counts: the entropy coder gains nearly all, and short
# matches only cost. Measured on fp32 weights: level 1 leaves 84.2% for 2.1 s of CPU per GB, a table of 256 matches of
# 7 bytes 83.5% for 1.35 s; higher levels find more matches and are both slower and larger.
_PLANE_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=20,
    chain_log=6,
    hash_log=8,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
)


def encode(
    chunk: memoryview, codec: Codec, *, most_bytes: int, on_block: Callable[[], None] = lambda: None
) -> bytearray | None:
    """The stored form, or None if it would be larger than `most_bytes`.

    `chunk` is contiguous and does not change meanwhile. `on_block` is called before each block, and may raise to stop.
    """
    raw = chunk.cast("B")
    encoded = bytearray()
    compressor = _compressor(codec, raw.nbytes)
    for part in _in_planes(raw, codec.planes, on_block):
        encoded += compressor.compress(part)
        if len(encoded) > most_bytes:
            return None
    encoded += compressor.flush()
    return encoded if len(encoded) <= most_bytes else None


def _compressor(codec: Codec, size: int) -> zstandard.ZstdCompressionObj:
    if codec.planes > 1:
        return zstandard.ZstdCompressor(compression_params=_PLANE_PARAMETERS).compressobj(size=size)
    return zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=size)


def _in_planes(raw: memoryview, planes: int, on_block: Callable[[], None]) -> Iterator[bytes | memoryview]:
    """The chunk's bytes in the order in which they are compressed."""
    block_bytes = planes * PLANE_BYTES
    for start in range(0, raw.nbytes, block_bytes):
        on_block()
        part = raw[start : start + block_bytes]
        if planes == 1:
            yield part
            continue
        block = bytes(part)
        whole = len(block) // planes * planes
        for plane in range(planes):
            yield block[plane:whole:planes]
        yield block[whole:]


Piece = bytes | bytearray | memoryview


class DecodeError(ValueError):
    """These bytes are not a chunk of that size in that codec. The message says why in a few words."""


def decode(codec: Codec, chunk_bytes: int, pieces: Iterator[Piece]) -> Iterator[memoryview]:
    """Yields the chunk's bytes, exactly `chunk_bytes` in all, from the stored bytes, in `pieces` of any size. A block,
    and a piece, is valid until the next one is asked for. Raises DecodeError, and the errors of `pieces`."""
    if codec is Codec.RAW:
        raise ValueError("raw bytes need no decoding")
    frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(
        cast("IO[bytes]", _Source(pieces)),  # the stubs ask for a whole file; it only calls read
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
    """The decompressor's source. It takes pieces of any size, whatever the decompressor asked for."""

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
    """`block` with the bytes of `ordered` back in their places; `ordered` itself if nothing was moved."""
    if planes == 1:
        return ordered
    items = size // planes
    whole = items * planes
    for plane in range(planes if items else 0):  # an empty slice would be taken for a deletion
        block[plane:whole:planes] = memoryview(ordered)[plane * items : (plane + 1) * items]
    block[whole:size] = memoryview(ordered)[whole:size]
    return block
