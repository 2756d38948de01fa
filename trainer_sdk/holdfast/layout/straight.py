"""Which chunks are, byte for byte, one run of a wanted piece: they arrive in place and are never copied. Pure.

A large tensor is cut by bytes and not by rows, so one chunk may be several reads: the rest of a row, whole rows, and
the beginning of one.
"""

from collections.abc import Iterable
from math import prod
from operator import attrgetter
from typing import NamedTuple

from holdfast.layout.reshard import Read


class Run(NamedTuple):
    """`bytes` bytes of the wanted piece `name`, from `offset` on."""

    name: str
    offset: int
    bytes: int


def straight(reads: Iterable[Read]) -> Run | None:
    """All that is read of one chunk, if that is its first bytes in their order, and goes to one place. Else None."""
    first, *others = sorted(reads, key=attrgetter("chunk_offset"))
    end = 0
    for read in (first, *others):
        begins = read.destination_offset - first.destination_offset
        if read.name != first.name or not read.chunk_offset == begins == end or not _is_dense(read):
            return None
        end += read.bytes
    return Run(first.name, first.destination_offset, end)


def _is_dense(read: Read) -> bool:
    """Its elements lie side by side, in the chunk and in the piece. Along a dimension of size 1 nothing is stepped."""
    return all(
        size == 1 or in_chunk == in_piece == prod(read.shape[axis + 1 :]) * read.item_bytes
        for axis, (size, in_chunk, in_piece) in enumerate(
            zip(read.shape, read.chunk_strides, read.destination_strides, strict=True)
        )
    )
