"""How far a restore or a save of this process is: bytes, rate, time left; and how the log prints them.

    restore, pipeline -> ProgressMeter.advance      ckpt.progress, the log's lines -> ProgressMeter.read

A value to ask for, not a callback: no user code runs on transfer threads, and no error of such code can end one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


def speak_up() -> None:
    """Makes the INFO lines of `holdfast` (one per restore and per commit) visible on stderr, unless the root logger has
    a handler. Python hides INFO by default."""
    logger = logging.getLogger("holdfast")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s holdfast: %(message)s", datefmt="%H:%M:%S"))
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def readable_bytes(count: int) -> str:
    """`1.5 GB`; powers of 1000, as disks and networks are sold."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"


RATE_OVER_SECONDS = 20.0
FIRST_REPORT_SECONDS = 10.0
REPORT_EVERY_SECONDS = 30.0


class Phase(StrEnum):
    RESTORING = "restoring"
    SAVING = "saving"


@dataclass(frozen=True)
class Progress:
    """This process's progress at one moment. A byte counts once its chunk is verified."""

    phase: Phase
    step: int
    bytes_done: int
    bytes_total: int
    bytes_per_second: float
    """Over the last 20 seconds."""
    seconds_left: float | None
    """None while it is unknown: at the beginning, and while no bytes arrive."""


class ProgressMeter:
    """Thread-safe. `clock` must be monotonic: a reset wall clock would make the rate negative."""

    def __init__(
        self, phase: Phase, step: int, bytes_total: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._phase = phase
        self._step = step
        self._total = bytes_total
        self._clock = clock
        self._lock = threading.Lock()
        self._done = 0
        now = clock()
        self._samples = deque([(now, 0)])
        self._next_report = now + FIRST_REPORT_SECONDS

    def advance(self, count: int) -> Progress | None:
        """Counts `count` more verified bytes. Returns a Progress if a line in the log is due."""
        with self._lock:
            now = self._clock()
            self._done += count
            self._samples.append((now, self._done))
            if now < self._next_report:
                return None
            self._next_report = now + REPORT_EVERY_SECONDS
            return self._at(now)

    def read(self) -> Progress:
        with self._lock:
            return self._at(self._clock())

    def _at(self, now: float) -> Progress:
        # The last sample before the span stays, because the rate must cover the whole span.
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_OVER_SECONDS:
            self._samples.popleft()
        since, done_then = self._samples[0]
        rate = (self._done - done_then) / (now - since) if now > since else 0.0
        left = max(0, self._total - self._done)
        seconds = 0.0 if left == 0 else left / rate if rate > 0 else None
        # A save's documents are not in its total, so more bytes than that can be done.
        return Progress(self._phase, self._step, min(self._done, self._total), self._total, rate, seconds)


class ProgressBoard:
    """The one restore or save that this process is at."""

    def __init__(self) -> None:
        self._meter: ProgressMeter | None = None

    @contextmanager
    def under_way(self, phase: Phase, step: int, bytes_total: int) -> Iterator[ProgressMeter]:
        meter = self._meter = ProgressMeter(phase, step, bytes_total)
        try:
            yield meter
        finally:
            self._meter = None

    def read(self) -> Progress | None:
        """None while neither runs."""
        meter = self._meter
        return None if meter is None else meter.read()


def readable_seconds(seconds: float | None) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`; `unknown`."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
