"""Host memory -> slab on several threads, and not on torch's own: those wait for each other once per tensor, and where
the cores are busy each of these waits is a turn of the scheduler. Here nobody waits until all parts are taken.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from holdfast_client.chunks.workers import WorkerThreads

_PART_BYTES = 8 * 1024 * 1024
_ALONE_BYTES = 2 * _PART_BYTES
"""Less than this is copied before a second thread would have begun."""


class Copy(NamedTuple):
    """`source` is copied onto `target`: integers of one width, of one shape."""

    target: torch.Tensor
    source: torch.Tensor


class HostCopy:
    """Copies between contiguous tensors in host memory, cut into parts that whoever is free takes."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies  # keeps the memory that the parts point to
        self._parts = deque(
            (copy.target.data_ptr() + at, copy.source.data_ptr() + at, min(_PART_BYTES, copy.source.nbytes - at))
            for copy in copies
            for at in range(0, copy.source.nbytes, _PART_BYTES)
        )
        self._changed = threading.Condition()
        self._helping = 0

    def run(self, helpers: WorkerThreads | None) -> None:
        """Returns when every byte is copied. Helpers that come later find nothing to do and touch nothing; nor does
        any go on when this is interrupted."""
        if helpers is not None and sum(size for *_, size in self._parts) >= _ALONE_BYTES:
            for _ in range(helpers.count - 1):
                helpers.submit(self._help)
        try:
            self._take_parts()
        finally:
            with self._changed:
                self._parts.clear()
                while self._helping:
                    self._changed.wait()
            self._copies = ()

    def _help(self) -> None:
        with self._changed:
            if not self._parts:
                return
            self._helping += 1
        self._take_parts()
        with self._changed:
            self._helping -= 1
            self._changed.notify_all()

    def _take_parts(self) -> None:
        while True:
            try:
                target, source, size = self._parts.popleft()
            except IndexError:
                return
            ctypes.memmove(target, source, size)  # lets go of the interpreter's lock
