"""The threads that move bytes. Plain and started at once: an executor refuses work when the interpreter is ending,
which is when an emergency save comes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

DEFAULT_COUNT = 4


class TransferWorkers:
    """`count` threads with one queue. Keep one for as long as there are transfers; `close` joins the threads.

    A job must catch its own exceptions; uploader and fetcher do, and turn them into results.
    """

    def __init__(self, count: int = DEFAULT_COUNT) -> None:
        self.count = count
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"holdfast-transfer-{number}", daemon=True)
            for number in range(count)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # A waiting thread must not keep the last job's buffers alive.
            del job
