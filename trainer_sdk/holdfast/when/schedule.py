"""Whether a step is saved: one decision after each step, the same on every rank.

    steps       arithmetic on the step's number, which all ranks have
    time        rank 0's clock, through the agreement (agreement.py): it asks `wants` in the background
    best        rank 0's metric, shared in one small vote, only at steps whose metrics hold it
    put off     what was due while an earlier save was in flight: done at the first step after that one

A save that is put off is not lost: with a vote at each later step it would cost a collective a step, so it goes by the
agreement too. Saves never come faster than they become durable; the interval stretches instead, and that is said once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum, auto

from holdfast.handle import SaveHandle
from holdfast.metric_values import Metrics
from holdfast.ranks import Question, Ranks
from holdfast.when.attendance import Attendance
from holdfast.when.best import BestSoFar, KnownBest
from holdfast.when.policies import Auto, Best, Every, Policy

log = logging.getLogger("holdfast")


class Due(Enum):
    """Why a step is saved now."""

    BY_INTERVAL = auto()
    BEST = auto()
    """This step and no later one: its save waits for the one in flight."""


class Schedule:
    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        *,
        busy: Callable[[], bool],
        recommended_seconds: Callable[[], float],
        known_best: KnownBest,
    ) -> None:
        """`busy`: whether a save of this rank is in flight. `recommended_seconds`: the service's word on Auto's
        interval, infinite while it is unknown. `known_best`: asked on rank 0."""
        self._ranks = ranks
        self._alone = ranks.world_size == 1
        self._busy = busy
        self._recommended_seconds = recommended_seconds
        parts = policy.parts
        self._by_steps = [part for part in parts if isinstance(part, Every) and part.steps is not None]
        self._seconds = min((part.seconds or math.inf for part in parts if isinstance(part, Every)), default=math.inf)
        self._auto = any(isinstance(part, Auto) for part in parts)
        self._bests = [BestSoFar(part, known_best) for part in parts if isinstance(part, Best)]
        store = ranks.store("attendance") if self._bests else None
        self._attendance = None if store is None else Attendance(ranks, store)
        self._since = time.monotonic()
        self._put_off = False
        self._stretched = False

    def wants(self) -> bool:
        """Whether a save is due by the clock, or was put off and can be done now. On rank 0, on any thread."""
        if not (self._put_off or time.monotonic() - self._since >= self._interval_seconds()):
            return False
        if not self._busy():
            return True
        self._say_that_it_stretches()
        return False

    def due(self, step: int, metrics: Metrics | None, *, agreed: bool) -> Due | None:
        """After each step, on every rank. `agreed`: the ranks agreed on this step. A collective only where `metrics`
        hold the name of a Best.

        Raises RanksDisagree where some ranks' metrics hold it and others' do not, and TypeError on every rank where
        rank 0's is no number.
        """
        if self._bests and self._is_best(step, metrics or {}):
            return Due.BEST
        if agreed or any(every.due_after(step) for every in self._by_steps):
            return Due.BY_INTERVAL
        # A lone process needs nobody's word.
        return Due.BY_INTERVAL if self._put_off and self._alone and not self._busy() else None

    def saved(self, metrics: Metrics | None, handle: SaveHandle, due: Due | None) -> None:
        """A save began, or was declined by all ranks. `due`: why; None: the script asked for it."""
        if handle.declined and due is Due.BY_INTERVAL:
            self._put_off = True
            self._say_that_it_stretches()
        elif not handle.declined:
            self._put_off = False
            # What has diverged cannot be restored, so its number is no best.
            if self._ranks.is_first and handle.diverged is None:
                for best in self._bests:
                    best.saving(metrics, handle.committed)

    def restart(self) -> None:
        """A save is over for the training thread, or has failed to begin: time is counted from here."""
        self._since = time.monotonic()

    def restored(self) -> None:
        """The state was loaded anew."""
        self.restart()
        self._put_off = False
        for best in self._bests:
            best.forget()

    def close(self) -> None:
        """No step comes any more."""
        if self._attendance is not None:
            self._attendance.close()

    def _interval_seconds(self) -> float:
        return min(self._seconds, self._recommended_seconds() if self._auto else math.inf)

    def _is_best(self, step: int, metrics: Metrics) -> bool:
        given = [best for best in self._bests if best.policy.metric in metrics]
        if not given:
            if self._attendance is not None:
                self._attendance.passed()
            return False
        better, error = False, None
        if self._ranks.is_first:
            try:
                better = any(best.beaten_by(metrics) for best in given)
            except Exception as caught:  # the other ranks are on their way into the vote
                error = caught
        with nullcontext() if self._attendance is None else self._attendance.voting(step, given[0].policy.metric):
            return self._ranks.first_says(step, Question.IS_BEST, yes=better, error=error)

    def _say_that_it_stretches(self) -> None:
        if self._ranks.is_first and not self._stretched:
            self._stretched = True
            log.warning(
                "a save is due while an earlier save is still in flight. It is done at the first step after that one: "
                "where saves take longer than the interval, the interval stretches. This is said once."
            )
