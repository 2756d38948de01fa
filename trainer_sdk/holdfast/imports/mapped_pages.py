"""Pages of mapped source files, given back when they were read.

A page of a mapped file counts as memory of the process from its first reading on, until the kernel needs it for others.
So a source of 10 GB would look like 10 GB, and a limit of a container or a watchdog would take it for that. What was
sent and compared is given back at once; the kernel's cache of the file keeps it for the next reading.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from holdfast.layout.chunk_bytes import Bytes

_MAPS = Path("/proc/self/maps")


def give_back_pages(part: Bytes | memoryview) -> None:
    """Takes the pages of a mapped file out of this process's memory; they come back when they are read again. Does
    nothing with other memory, whose pages would be lost, and on systems that do not list what is mapped."""
    array = np.frombuffer(part, dtype=np.uint8)
    begin, end = array.ctypes.data, array.ctypes.data + array.size
    with suppress(OSError):
        for first, last in _mapped_files():
            if first <= begin and end <= last:
                page_begin = begin - begin % mmap.PAGESIZE
                _madvise(page_begin, end - page_begin, mmap.MADV_DONTNEED)
                return


def _mapped_files() -> Iterator[tuple[int, int]]:
    for line in _MAPS.read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            first, _, last = addresses.partition("-")
            yield int(first, 16), int(last, 16)


def _madvise(begin: int, size: int, advice: int) -> None:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call(begin, size, advice)
