"""How far this process is: the bytes, rate and time left of its restore or save, and how the log prints them; and the
steps and the standing still of its training, which heartbeats report.

    restore, pipeline -> ProgressMeter.advance      ckpt.progress, the log's lines -> ProgressMeter.read
    step(), save(), restore() -> ProgressReport     session/session.py -> ProgressReport.read

A value to ask for, not a callback: no user code runs on transfer threads, and no error of such code can end one.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast_protocol.states import Doing


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


@dataclass(frozen=True)
class _Reading:
    """The values at the heartbeat before."""

    steps_run: int
    training_seconds: float


class ProgressReport:
    """What the training thread of this process has done: the numbers of its heartbeats and of its last report.

    The training thread writes, the heartbeat's thread reads. A step costs less than a microsecond: there is no lock,
    and values that belong together are replaced as one.

    Steps are counted by their numbers: after `step(10)`, `step(20)` counts for ten."""

    def __init__(self) -> None:
        self._doing = Doing.TRAINING
        self._base: int | None = None
        """The step whose state training goes on from; None at the very beginning. It outlives the attempt, because a
        rollback leaves steps of the attempt before."""
        self.begin()

    def begin(self) -> None:
        """An attempt begins: all sums become zero. The current activity goes on."""
        self.saves_begun = 0
        self._began_at = time.monotonic()
        self._first: tuple[int, float] | None = None
        """The first step, and when it ended."""
        self._ran: tuple[int | None, int] = (None, 0)
        """The last step, and how many steps there were."""
        self._progressed_at = self._began_at
        self._tells_steps = False
        """The job calls step(), so that silence means something."""
        self._doing_since = self._began_at
        self._seconds = {Doing.RESTORING: 0.0, Doing.SAVING: 0.0}
        self._read = _Reading(0, 0.0)

    @property
    def step(self) -> int | None:
        """The last step that ran, here or before the restore point; None before the first."""
        return self._base

    def ran(self, step: int) -> None:
        """After each step. A repeated number is no step."""
        self._tells_steps = True
        self.reached(step)

    def reached(self, step: int) -> None:
        """Before a save that the script asked for: its step tells how far the job is."""
        step = operator.index(step)
        base, steps_run = self._base, self._ran[1]
        if base is None:
            steps_run += 1
        elif step > base:
            steps_run += step - base
        self._base = step
        self._ran = (step, steps_run)
        self._progressed_at = now = time.monotonic()
        if self._first is None:
            self._first = (step, now)

    def goes_on_from(self, next_step: int) -> None:
        """The state was restored; 0: the run had no checkpoint."""
        self._base = next_step - 1 if next_step else None

    @contextmanager
    def restoring(self) -> Iterator[None]:
        with self._at(Doing.RESTORING):
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While training waits for a save."""
        with self._at(Doing.SAVING):
            yield

    def read(self) -> dict[str, Any]:
        """The fields of a `holdfast_protocol.attempts.ProgressReport`."""
        now = time.monotonic()
        (step, steps_run), first = self._ran, self._first
        return {
            "step": step,
            "first_step": None if first is None else first[0],
            "steps_run": steps_run,
            "first_step_age_seconds": None if first is None else max(0.0, now - first[1]),
            "progress_age_seconds": max(0.0, now - self._progressed_at) if self._tells_steps else None,
            "restore_seconds": self._seconds_of(Doing.RESTORING, now),
            "saves_begun": self.saves_begun,
            "save_blocked_seconds": self._seconds_of(Doing.SAVING, now),
            "doing": self._doing,
        }

    def steps_per_second(self) -> float | None:
        """Since the last call, without saves and restores; None if no step ran since. Only one reader may call it."""
        now = time.monotonic()
        before, steps_run = self._read, self._ran[1]
        training = now - self._began_at - sum(self._seconds_of(doing, now) for doing in self._seconds)
        self._read = _Reading(steps_run, training)
        steps, seconds = steps_run - before.steps_run, training - before.training_seconds
        return steps / seconds if steps > 0 and seconds > 0 else None

    @contextmanager
    def _at(self, doing: Doing) -> Iterator[None]:
        outer = self._doing
        if outer is not Doing.TRAINING:  # a save inside a restore counts as the restore's time
            yield
            return
        self._doing_since = time.monotonic()
        self._doing = doing
        try:
            yield
        finally:
            now = time.monotonic()
            self._doing = outer
            self._seconds[doing] += now - self._doing_since
            self._progressed_at = now

    def _seconds_of(self, doing: Doing, now: float) -> float:
        under_way = max(0.0, now - self._doing_since) if self._doing is doing else 0.0
        return self._seconds[doing] + under_way
