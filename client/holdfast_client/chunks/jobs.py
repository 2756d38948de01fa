"""Transfers of one uploader or fetcher that run on shared threads: their results come back to the calling thread.

The calling thread alone holds state and talks to the service; the jobs only move bytes. `drain` returns when no thread
touches the caller's memory any more, which is what makes it safe to reuse.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_client.chunks.stopping import check_stop
from holdfast_client.chunks.workers import TransferWorkers


@dataclass(frozen=True)
class Done:
    """`error` is None if the transfer of `digest` went well."""

    digest: str
    error: BaseException | None


class Jobs:
    def __init__(self, workers: TransferWorkers, stop: threading.Event) -> None:
        self._workers = workers
        self._stop = stop
        self._results: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self.running = 0

    @property
    def has_idle_thread(self) -> bool:
        return self.running < self._workers.count

    def start(self, digest: str, transfer: Callable[[], None]) -> None:
        self.running += 1

        def job() -> None:
            error: BaseException | None = None
            try:
                check_stop(self._stop)
                transfer()
            except BaseException as caught:  # the calling thread raises it again
                error = caught
            self._results.put(Done(digest, error))

        self._workers.submit(job)

    def next(self, timeout_seconds: float | None = None) -> Done | None:
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
