"""Work of one uploader or fetcher that runs on shared threads: its results come back to the calling thread.

The calling thread alone holds state and talks to the service; the jobs only move and hash bytes. `drain` returns when
no thread touches the caller's memory any more, which is what makes it safe to reuse.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast_client.chunks.stopping import check_stop
from holdfast_client.chunks.workers import WorkerThreads

K = TypeVar("K")
R = TypeVar("R")


@dataclass(frozen=True)
class Done(Generic[K, R]):
    """The job `key` has ended: with `result`, or with `error`."""

    key: K
    result: R | None
    error: BaseException | None


class Jobs(Generic[K, R]):
    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._results: queue.SimpleQueue[Done[K, R]] = queue.SimpleQueue()
        self.running = 0

    def start(self, threads: WorkerThreads, key: K, work: Callable[[], R]) -> None:
        self.running += 1

        def job() -> None:
            result: R | None = None
            error: BaseException | None = None
            try:
                check_stop(self._stop)
                result = work()
            except BaseException as caught:  # the calling thread raises it again
                error = caught
            self._results.put(Done(key, result, error))

        threads.submit(job)

    def next(self, timeout_seconds: float | None = None) -> Done[K, R] | None:
        """The next result; None if there is none within the time (None: wait for it, 0: do not wait)."""
        try:
            done = self._results.get(timeout=timeout_seconds) if timeout_seconds != 0 else self._results.get_nowait()
        except queue.Empty:
            return None
        self.running -= 1
        return done

    def drain(self) -> None:
        """Stops what runs and waits for it."""
        self._stop.set()
        while self.running:
            self.next()
