"""The threads that move and hash bytes, and the jobs that run on them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from holdfast_client.transport import check_stop

LONGEST_WAIT_SECONDS = 0.5
"""A longer job waits for a disk, not for a core, so the next thread runs beside it. A hanging filesystem thus
delays only the threads that write to it."""

T = TypeVar("T")


class CoreLimit:
    """Hashing, encoding and writing into a file: at most as many threads at once as there are cores. More would gain
    nothing: a thread would wait for a core while it holds the interpreter's lock, and training waits for that lock
    (docs/adr/0036)."""

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def run(self, work: Callable[[], T]) -> T:
        """Carries out `work`, which must release the interpreter's lock for most of its time. From any thread, and
        never within another `run`."""
        try:
            self._free.get(timeout=LONGEST_WAIT_SECONDS)
        except queue.Empty:
            return work()
        try:
            return work()
        finally:
            self._free.put(None)


def usable_cores() -> int:
    # A launcher may have bound this rank to some of the cores; macOS cannot tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


DEFAULT_COUNT = 4
MOST_HASHING = 4


class WorkerThreads:
    """`count` threads with one queue, plain and started at once: an executor refuses work while the interpreter ends,
    but an emergency save may come then. A job must catch its own exceptions; Jobs turns them into results."""

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

    def end(self) -> None:
        """Ends the threads after the submitted jobs. Does not wait."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self, until: float | None) -> None:
        """Waits for their end, but not beyond `until` (`time.monotonic()`)."""
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # A waiting thread must not keep the last job's buffers alive.
            del job


class TransferWorkers:
    """`count` threads that send and fetch, one that calls the service, and a few that hash, because one core hashes
    slower than a local disk writes.

    Keep one for as long as there are transfers; `close` joins the threads.
    """

    def __init__(self, count: int = DEFAULT_COUNT, *, hashing: int = MOST_HASHING, keeps: bool = False) -> None:
        """`hashing`: the most threads that hash; each has a chunk. `keeps`: the local tier gets hashing threads of its
        own, because those of an upload may wait for the store."""
        self.transfers = WorkerThreads(count, "holdfast-transfer")
        self.hashing = WorkerThreads(min(hashing, usable_cores()), "holdfast-hash")
        self.keeping = WorkerThreads(self.hashing.count, "holdfast-keep") if keeps else self.hashing
        self.calls = WorkerThreads(1, "holdfast-call")

    def close(self, timeout_seconds: float | None = None) -> None:
        """Ends the threads after the submitted jobs. A thread that takes longer, in a filesystem that hangs, is left
        behind, and does not keep the process alive."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pools = dict.fromkeys((self.transfers, self.hashing, self.keeping, self.calls))
        for pool in pools:
            pool.end()
        for pool in pools:
            pool.join(until)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


K = TypeVar("K")
R = TypeVar("R")


@dataclass(frozen=True)
class Done(Generic[K, R]):
    """The job `key` has ended: with `result`, or with `error`."""

    key: K
    result: R | None
    error: BaseException | None

    """Jobs of one uploader or fetcher on shared threads; their results come back to the calling thread. That thread
    alone holds state and calls the service; the jobs only move and hash bytes."""


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
        """Stops the running jobs and waits for them. Then no thread touches the caller's memory, which may be
        reused."""
        self._stop.set()
        while self.running:
            self.next()
