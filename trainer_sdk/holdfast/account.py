"""What the training thread of this process has done: the numbers of its heartbeats, and of its last word (heart.py).

The training thread writes, the heartbeat's thread reads. A step costs less than a microsecond: nothing is locked, and
what belongs together is replaced as one.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast_protocol.states import Doing


@dataclass(frozen=True)
class _Reading:
    """What the heartbeat before had seen."""

    steps_run: int
    training_seconds: float


class TrainingAccount:
    """Of one process. Steps are counted as they are numbered: of `step(10)`, `step(20)` the second counts for ten."""

    def __init__(self) -> None:
        self._doing = Doing.TRAINING
        self._base: int | None = None
        """The step whose state training goes on from; None at the very beginning. Outlives the attempt: what is gone
        back from was reached in the one before."""
        self.begin()

    def begin(self) -> None:
        """An attempt begins: all sums are zero. What is being done goes on."""
        self.saves_begun = 0
        self._began_at = time.monotonic()
        self._first: tuple[int, float] | None = None
        """The first step, and when it was over."""
        self._ran: tuple[int | None, int] = (None, 0)
        """The last step, and how many there were."""
        self._progressed_at = self._began_at
        self._tells_steps = False
        """It calls step(), so that silence means something."""
        self._doing_since = self._began_at
        self._seconds = {Doing.RESTORING: 0.0, Doing.SAVING: 0.0}
        self._read = _Reading(0, 0.0)

    @property
    def step(self) -> int | None:
        """The last step that was run, here or before the restore point; None before the first."""
        return self._base

    def ran(self, step: int) -> None:
        """After each step. The same one again is no step."""
        self._tells_steps = True
        self.reached(step)

    def reached(self, step: int) -> None:
        """Before a save that was asked for: it tells how far the job is."""
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
        """The state was restored; 0: there was nothing to restore."""
        self._base = next_step - 1 if next_step else None

    @contextmanager
    def restoring(self) -> Iterator[None]:
        with self._at(Doing.RESTORING):
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While training stands still for a save."""
        with self._at(Doing.SAVING):
            yield

    def read(self) -> dict[str, Any]:
        """The fields of a `holdfast_protocol.attempts.Account`."""
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
        """Since it was last asked, without saves and restores; None while no step was run since. For one reader."""
        now = time.monotonic()
        before, steps_run = self._read, self._ran[1]
        training = now - self._began_at - sum(self._seconds_of(doing, now) for doing in self._seconds)
        self._read = _Reading(steps_run, training)
        steps, seconds = steps_run - before.steps_run, training - before.training_seconds
        return steps / seconds if steps > 0 and seconds > 0 else None

    @contextmanager
    def _at(self, doing: Doing) -> Iterator[None]:
        outer = self._doing
        if outer is not Doing.TRAINING:  # a save inside of a restore is the restore's time
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
