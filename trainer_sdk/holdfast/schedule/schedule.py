"""Whether a step is saved: one decision after each step, the same on every rank; and the best so far.

    steps       arithmetic on the numbers of this step and the one before, which all ranks have
    time        rank 0's clock, through the agreement (step_agreement.py): it asks `wants` in the background
    best        rank 0's metric, shared in one small vote, only at steps whose metrics have it
    deferred    a save that was due while an earlier one was in flight: made at the first step after that one

A deferred save is not lost. It goes by the agreement too, because a vote at each later step would cost a collective a
step. Rank 0 knows when it is free itself. If another rank was busy, rank 0 tries again after 2 s, then after 4 s, and
so on up to a minute. Saves never come faster than they become durable: the interval stretches instead, which is logged
once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any

from holdfast.distributed.ranks import Question, Ranks
from holdfast.distributed.vote_watchdog import VoteWatchdog
from holdfast.errors import HoldfastError
from holdfast.save.job import SaveHandle
from holdfast.save.saver import Metrics, number_of
from holdfast.schedule.save_policy import Auto, Best, Every, Policy
from holdfast_client.client import Client
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast")

_AGAIN_SECONDS = 2.0
_LONGEST_AGAIN_SECONDS = 60.0

KnownBest = Callable[[Best], float | None]
"""The metric of the best checkpoint that can be restored; None if there is none."""


def known_best(client: Client, run: RunName, policy: Best) -> float | None:
    """The metric of the checkpoint that `restore(at=…)` would load. If the service does not answer it is unknown: the
    step is then saved, at worst one save too many."""
    try:
        found = client.restores.restore_point(run.project, run.run, policy.selector).restore_point
        metric = None if found is None else client.checkpoints.get(found.checkpoint_id).metrics.get(policy.metric)
    except HoldfastError as error:
        log.warning("which step had the best %r is not known, so the next one is saved: %s", policy.metric, error)
        return None
    return None if metric is None else metric.value


class BestSoFar:
    """The best value of one metric, of checkpoints that can be restored or are on their way there. `Schedule` asks at
    the steps whose metrics have it. The saves of earlier attempts count, because a resumed run must not save a worse
    step as its best; so the service is asked once after a restore, in the background. Only a step that comes before the
    answer waits for it.

    Used by the training thread of rank 0; saves end on background threads, in any order, and some of them fail."""

    def __init__(self, policy: Best, known: KnownBest) -> None:
        self.policy = policy
        self._known = known
        self._found: Future[float | None] | None = None
        """The service's answer; None until it is asked."""
        self._best: float | None = None
        """The best value of this process that can be restored."""
        self._on_the_way: dict[Future[Any], float] = {}
        self._lock = threading.Lock()

    def forget(self) -> None:
        """The state was loaded again, perhaps from before the best: the service must be asked again."""
        with self._lock:
            self._found = self._best = None
            self._on_the_way.clear()

    def ask(self) -> Future[float | None]:
        """Asks the service on a thread of its own. Returns at once."""
        self._found = found = Future[float | None]()
        try:
            threading.Thread(target=self._ask, args=(found,), name="holdfast-best", daemon=True).start()
        except RuntimeError:  # no thread can be started
            self._ask(found)
        return found

    def _ask(self, found: Future[float | None]) -> None:
        try:
            found.set_result(self._known(self.policy))
        except BaseException as error:  # the step that needs the answer raises it
            found.set_exception(error)

    def beaten_by(self, metrics: Metrics) -> bool:
        """Whether this step is better. Raises TypeError for a value that is no number; never an error of the
        service."""
        number = number_of(self.policy.metric, metrics[self.policy.metric])
        if not math.isfinite(number):
            return False
        found = (self._found or self.ask()).result()
        with self._lock:
            return all(self._is_better(number, than) for than in (found, self._best, *self._on_the_way.values()))

    def saving(self, metrics: Metrics | None, committed: Future[Any]) -> None:
        """A save of this step has begun: it counts, unless it is not committed."""
        if metrics is None or self.policy.metric not in metrics:
            return
        number = number_of(self.policy.metric, metrics[self.policy.metric])
        if not math.isfinite(number):
            return
        with self._lock:
            self._on_the_way[committed] = number
        committed.add_done_callback(self._settle)

    def _settle(self, committed: Future[Any]) -> None:
        with self._lock:
            number = self._on_the_way.pop(committed, None)
            if committed.exception() is None:
                self._keep(number)

    def _keep(self, number: float | None) -> None:
        if number is not None and self._is_better(number, self._best):
            self._best = number

    def _is_better(self, number: float, than: float | None) -> bool:
        if than is None:
            return True
        return number < than if self.policy.mode == "min" else number > than


class Due(Enum):
    """Why a step is saved now."""

    BY_INTERVAL = auto()
    BEST = auto()
    """This step and no later one: its save waits for the save in flight."""


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
        """`busy`: whether a save of this rank is in flight. `recommended_seconds`: the service's interval for Auto,
        infinite while it is unknown. `known_best`: asked on rank 0."""
        self._ranks = ranks
        self._alone = ranks.world_size == 1
        self._busy = busy
        self._recommended_seconds = recommended_seconds
        parts = policy.parts
        self._by_steps = [part for part in parts if isinstance(part, Every) and part.steps is not None]
        self._seconds = min((part.seconds or math.inf for part in parts if isinstance(part, Every)), default=math.inf)
        self._auto = any(isinstance(part, Auto) for part in parts)
        self._bests = [BestSoFar(part, known_best) for part in parts if isinstance(part, Best)]
        store = ranks.store("votes") if self._bests else None
        self._watchdog = None if store is None else VoteWatchdog(ranks, store)
        self._since = time.monotonic()
        self._deferred = False
        self._again_at, self._again_seconds = -math.inf, _AGAIN_SECONDS
        self._stretched = False

    def wants(self) -> bool:
        """Whether a save is due by the clock, or was deferred and can be done now. On rank 0, on any thread."""
        due_at = self._again_at if self._deferred else self._since + self._interval_seconds()
        if time.monotonic() < due_at:
            return False
        if not self._busy():
            return True
        self._say_that_it_stretches()
        return False

    def due(self, step: int, metrics: Metrics | None, *, agreed: bool, last: int | None = None) -> Due | None:
        """After each step, on every rank. `agreed`: the ranks agreed on this step. `last`: the step before. A
        collective only if `metrics` have the name of a Best.

        Raises RanksDisagree if only some ranks' metrics have it, and TypeError on every rank if rank 0's is no number.
        """
        if self._bests and self._is_best(step, metrics or {}):
            return Due.BEST
        if agreed or any(every.due_after(step, last) for every in self._by_steps):
            return Due.BY_INTERVAL
        # A lone process needs no agreement.
        return Due.BY_INTERVAL if self._deferred and self._alone and not self._busy() else None

    def saved(self, metrics: Metrics | None, handle: SaveHandle, due: Due | None) -> None:
        """A save began, or all ranks declined it. `due`: why; None: the script asked for it."""
        if handle.declined and due is Due.BY_INTERVAL:
            self._deferred = True
            self._put_off()
            self._say_that_it_stretches()
        elif not handle.declined:
            self._deferred = False
            self._again_at, self._again_seconds = -math.inf, _AGAIN_SECONDS
            # A diverged checkpoint cannot be restored, so its value is no best.
            if self._ranks.is_first and handle.diverged is None:
                for best in self._bests:
                    best.saving(metrics, handle.committed)

    def restart(self) -> None:
        """The training thread is done with a save, or the save has failed to begin: time counts from here."""
        self._since = time.monotonic()

    def restored(self) -> None:
        """The state was loaded again."""
        self.restart()
        self._deferred = False
        for best in self._bests:
            best.forget()
            if self._ranks.is_first:
                best.ask()

    def close(self) -> None:
        """No further step comes."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _put_off(self) -> None:
        """Another rank was busy, and only a try shows when it is free: each stops all ranks for a vote."""
        if not self._busy():
            self._again_at = time.monotonic() + self._again_seconds
            self._again_seconds = min(2 * self._again_seconds, _LONGEST_AGAIN_SECONDS)

    def _interval_seconds(self) -> float:
        return min(self._seconds, self._recommended_seconds() if self._auto else math.inf)

    def _is_best(self, step: int, metrics: Metrics) -> bool:
        given = [best for best in self._bests if best.policy.metric in metrics]
        if not given:
            if self._watchdog is not None:
                self._watchdog.passed()
            return False
        better, error = False, None
        if self._ranks.is_first:
            try:
                better = any(best.beaten_by(metrics) for best in given)
            except Exception as caught:  # the other ranks are on their way into the vote
                error = caught
        with nullcontext() if self._watchdog is None else self._watchdog.voting(step, given[0].policy.metric):
            return self._ranks.first_says(step, Question.IS_BEST, yes=better, error=error)

    def _say_that_it_stretches(self) -> None:
        if self._ranks.is_first and not self._stretched:
            self._stretched = True
            log.warning(
                "a save is due while an earlier save is still in flight. It is done at the first step after that one: "
                "if saves take longer than the interval, the interval stretches. This is logged once."
            )
