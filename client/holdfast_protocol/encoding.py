"""A chunk's raw bytes -> its stored form. Pure. The inverse is decoding.py, the format docs/codecs.md.

No numpy here: planes are extended slices of small blocks, so that the interpreter's lock is never held for long, and
the compressor lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import zstandard

from holdfast_protocol.codecs import PLANE_BYTES, Codec

_LEVEL = 1

# A plane of a number's bytes has few repetitions and a skew in its bytes: nearly all is won by the entropy coder, and
# short matches only get in its way. Measured on fp32 weights: level 1 leaves 84.2% for 2.1 s of CPU per GB, a table of
# 256 matches of 7 bytes 83.5% for 1.35 s; higher levels find more matches and are both slower and larger.
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
