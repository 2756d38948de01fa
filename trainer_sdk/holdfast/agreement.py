"""Saving by the clock: the ranks agree on the step at which to save, and a step costs them a comparison of two numbers.

No rank may save alone, and asking all of them at every step would cost a collective per step. So background threads
agree through the job's key-value store, ahead of time:

    rank 0, when a save is due:  proposes a step that lies beyond the step it is at
    every rank:                  raises its barrier there, then acknowledges if it has not reached that step yet
    rank 0:                      writes the verdict: all acknowledged, or not
    a rank at its barrier:       waits for the verdict (which is there long before), and saves, or goes on
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from holdfast.errors import RanksDisagree
from holdfast.ranks import KeyValueStore, Ranks

log = logging.getLogger("holdfast")

POLL_SECONDS = 0.25
LEAD_SECONDS = 1.5
"""How far ahead a proposal lies. All ranks see it within POLL_SECONDS; the rest is for slow hosts."""
_ACKNOWLEDGE_SECONDS = 20.0
_NEVER = math.inf


class Clock(Protocol):
    """Tells when a save is due by the clock; the same answer for the same step on every rank."""

    def due(self, step: int) -> bool:
        """Whether to save after this step."""

    def restart(self) -> None:
        """The save that was due has begun, or has failed to: the interval begins anew."""

    def close(self) -> None:
        """Ends the background thread, if there is one."""


def clock_of(ranks: Ranks, interval: Callable[[], float]) -> Clock:
    """The clock for this world: a lone process has nobody to agree with.

    `interval`: the seconds from one save to the next; asked again each time, on rank 0.
    """
    store = ranks.store("agreement")
    return OwnClock(interval) if store is None else AgreedClock(ranks, store, interval)


class OwnClock:
    def __init__(self, interval: Callable[[], float]) -> None:
        self._interval = interval
        self.restart()

    def due(self, step: int) -> bool:
        return time.monotonic() - self._since >= self._interval()

    def restart(self) -> None:
        self._since = time.monotonic()

    def close(self) -> None:
        """Nothing runs in the background."""


@dataclass
class _Round:
    barrier: int
    decided: threading.Event = field(default_factory=threading.Event)
    go: bool = False
    lost: bool = False


class AgreedClock:
    """`due` is the training thread's; all else runs on one background thread per rank, started here."""

    def __init__(self, ranks: Ranks, store: KeyValueStore, interval: Callable[[], float]) -> None:
        self._interval = interval
        self._ranks = ranks
        self._store = store
        self._at = -1
        self._measured: tuple[int, float] | None = None
        self._steps_per_second = 0.0
        self._barrier: float = _NEVER
        self._round: _Round | None = None
        self._lock = threading.Lock()  # of _barrier and _round together; a step that is not at the barrier takes none
        self._stop = threading.Event()
        self.restart()
        self._thread = threading.Thread(target=self._run, name="holdfast-agreement", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Costs under a microsecond except at an agreed step. Raises RanksDisagree where no verdict comes in time."""
        # The order matters: `_answer` raises the barrier before it reads `_at`. Whichever of the two threads comes
        # second sees what the other one wrote, so that no rank acknowledges a barrier which it runs past.
        self._at = step
        return step >= self._barrier and self._verdict()

    def restart(self) -> None:
        self._since = time.monotonic()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10 * POLL_SECONDS)

    def _verdict(self) -> bool:
        current = self._round
        if current is None:
            return False
        if not current.decided.wait(self._ranks.timeout_seconds) or current.lost:
            raise RanksDisagree("No verdict came on saving after this step; rank 0 or the job's store has ended")
        if current.go:
            # Nothing is proposed until restart(): the others may still be on their way to this barrier, and a second
            # one would take its place.
            self._since = math.inf
        self._clear(current)
        return current.go

    def _clear(self, done: _Round) -> None:
        with self._lock:
            if self._round is done:
                self._barrier, self._round = _NEVER, None

    def _run(self) -> None:
        work: Callable[[], None] = self._lead if self._ranks.is_first else self._follow
        try:
            work()
        except (RuntimeError, dist.DistError) as error:
            if not self._stop.is_set():
                log.warning("the job's store does not answer any more, so nothing is saved by the clock: %s", error)
        finally:
            if (current := self._round) is not None and not current.decided.is_set():
                current.lost = True
                current.decided.set()

    def _lead(self) -> None:
        number, lead_seconds = 0, LEAD_SECONDS
        while not self._stop.wait(POLL_SECONDS):
            self._measure_speed()
            if self._round is not None or self._at < 0 or time.monotonic() - self._since < self._interval():
                continue
            barrier = self._at + 1 + math.ceil(self._steps_per_second * lead_seconds)
            self._store.set(f"{number}/step", str(barrier))
            current, reachable = self._answer(barrier)
            go = self._all_acknowledged(number) and reachable
            self._store.set(f"{number}/verdict", "go" if go else "no")
            self._decide(current, go=go)
            number, lead_seconds = number + 1, LEAD_SECONDS if go else lead_seconds * 2

    def _follow(self) -> None:
        number = 0
        while self._appears(f"{number}/step"):
            current, reachable = self._answer(int(self._store.get(f"{number}/step")))
            self._store.set(f"{number}/ack/{self._ranks.rank}", "yes" if reachable else "no")
            if not self._appears(f"{number}/verdict"):
                return
            self._decide(current, go=self._store.get(f"{number}/verdict") == b"go")
            number += 1

    def _answer(self, barrier: int) -> tuple[_Round, bool]:
        """Raises the barrier; then whether this rank has still to come to it."""
        current = _Round(barrier)
        with self._lock:
            self._round, self._barrier = current, barrier
        return current, self._at < barrier

    def _decide(self, current: _Round, *, go: bool) -> None:
        current.go = go
        if not go:
            self._clear(current)
        current.decided.set()

    def _all_acknowledged(self, number: int) -> bool:
        keys = [f"{number}/ack/{rank}" for rank in range(1, self._ranks.world_size)]
        deadline = time.monotonic() + _ACKNOWLEDGE_SECONDS
        while not self._store.check(keys):
            if self._stop.wait(POLL_SECONDS / 5) or time.monotonic() > deadline:
                return False
        return all(self._store.get(key) == b"yes" for key in keys)

    def _appears(self, key: str) -> bool:
        """Waits for the key; False if we stop. By asking: a blocking wait of torch's store logs each time-out."""
        while not self._store.check([key]):
            if self._stop.wait(POLL_SECONDS):
                return False
        return True

    def _measure_speed(self) -> None:
        at, now = self._at, time.monotonic()
        if self._measured is not None:
            before, then = self._measured
            fresh = max(0, at - before) / max(now - then, 1e-3)
            self._steps_per_second = max(fresh, self._steps_per_second * 0.9)
        self._measured = (at, now)
