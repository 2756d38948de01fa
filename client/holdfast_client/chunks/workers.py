"""The threads that move and hash bytes. Plain and started at once: an executor refuses work when the interpreter is
ending, which is when an emergency save comes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from holdfast_client.chunks.core_limit import usable_cores

DEFAULT_COUNT = 4
MOST_HASHING = 4


class WorkerThreads:
    """`count` threads with one queue. A job must catch its own exceptions; jobs.py turns them into results."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Ends when what was submitted is done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # A waiting thread must not keep the last job's buffers alive.
            del job


class TransferWorkers:
    """`count` threads that send and fetch, a few that hash, for one core hashes slower than a local disk writes, and
    one that calls the service.

    Keep one for as long as there are transfers; `close` joins the threads.
    """

    def __init__(self, count: int = DEFAULT_COUNT) -> None:
        self.transfers = WorkerThreads(count, "holdfast-transfer")
        self.hashing = WorkerThreads(min(MOST_HASHING, usable_cores()), "holdfast-hash")
        self.calls = WorkerThreads(1, "holdfast-call")

    def close(self) -> None:
        """Ends when what was submitted is done."""
        self.transfers.close()
        self.hashing.close()
        self.calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
