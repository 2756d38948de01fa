"""A background thread that takes saves in their order, one at a time: the pipeline has one for the upload, and one for
the spool.

Started at construction: a thread that is first needed while the interpreter ends could not be started any more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from holdfast.save_job import SaveJob


class SaveThread:
    """`work` must catch its own exceptions: the next save may go well."""

    def __init__(self, name: str, work: Callable[[SaveJob], None]) -> None:
        self._work = work
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: SaveJob) -> None:
        """From any thread; it comes after what was put before."""
        self._jobs.put(job)

    def end(self) -> None:
        """Once the saves that were put are done with. Does not wait."""
        self._jobs.put(None)

    def join(self, timeout_seconds: float) -> None:
        """Waits for the end; a thread that takes longer is left behind, and does not keep the process alive."""
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work(job)
            # A waiting thread must not keep the last save's memory alive.
            del job
