"""Hashing, encoding and writing into a file: as many threads at once as there are cores.

More of them would gain nothing, and make a thread wait for a core while it holds the interpreter's lock; training waits
for that lock (docs/adr/0036).
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import TypeVar

LONGEST_WAIT_SECONDS = 0.5
"""What takes longer waits for a disk and not for a core: whoever is next goes on beside it. So a filesystem that
hangs holds up nobody but who writes to it."""

T = TypeVar("T")


class CoreLimit:
    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def run(self, work: Callable[[], T]) -> T:
        """Carries `work` out, which lets go of the interpreter's lock for most of its time. From any thread, and never
        within another `run`."""
        try:
            self._free.get(timeout=LONGEST_WAIT_SECONDS)
        except queue.Empty:
            return work()
        try:
            return work()
        finally:
            self._free.put(None)


def usable_cores() -> int:
    # A launcher may have bound this rank to some of the cores; macOS cannot say.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
