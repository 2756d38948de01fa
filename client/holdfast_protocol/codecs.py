"""How a chunk's bytes may look on the wire and in the store: the codecs, by name. Pure; docs/codecs.md is the format.

Flow: the client picks a codec for a chunk -> encoding.py -> PUT -> the copy's row keeps it -> GET -> decoding.py.
A chunk's digest is always that of its raw bytes; what is stored may be smaller.
"""

from __future__ import annotations

from enum import StrEnum

PLANE_BYTES = 128 * 1024
"""Of a whole block. A zstd block holds as much, so that each plane gets statistics of its own."""

MAX_WINDOW_BYTES = 8 * 1024**2
"""Of a frame; a decoder needs no more memory than this and may refuse what asks for more."""


class Codec(StrEnum):
    RAW = "raw"
    ZSTD = "zstd"
    ZSTD_SHUFFLE2 = "zstd-shuffle2"
    ZSTD_SHUFFLE4 = "zstd-shuffle4"
    ZSTD_SHUFFLE8 = "zstd-shuffle8"

    @property
    def planes(self) -> int:
        """Into how many planes a block is split: the size of an item in bytes; 1 where the order is kept."""
        return _PLANES[self]

    @property
    def block_bytes(self) -> int:
        """The chunk's bytes that are put in order at once; only the last block may be shorter."""
        return self.planes * PLANE_BYTES


_PLANES = {Codec.RAW: 1, Codec.ZSTD: 1, Codec.ZSTD_SHUFFLE2: 2, Codec.ZSTD_SHUFFLE4: 4, Codec.ZSTD_SHUFFLE8: 8}

_SINCE_MINOR = dict.fromkeys(Codec, 1) | {Codec.RAW: 0}


def zstd_codec(item_bytes: int) -> Codec:
    """For a chunk of numbers of `item_bytes` each; anything but 2, 4 and 8 keeps the order of its bytes."""
    shuffled = {2: Codec.ZSTD_SHUFFLE2, 4: Codec.ZSTD_SHUFFLE4, 8: Codec.ZSTD_SHUFFLE8}
    return shuffled.get(item_bytes, Codec.ZSTD)


def codecs_of_minor(protocol_minor: int) -> frozenset[Codec]:
    """What a client of this minor version of the protocol can decode."""
    return frozenset(codec for codec, since in _SINCE_MINOR.items() if since <= protocol_minor)
