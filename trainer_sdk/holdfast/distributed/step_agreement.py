"""Acts that all ranks do after the same step, though one rank asked for them: save by the clock, or save and leave.

    any thread of any rank -> request(Ask) ~~ background threads agree ~~> due(step) on every training thread

Asking all ranks at every step would cost a collective per step. Instead background threads, one per rank, agree through
the job's key-value store, and a step costs a comparison of two numbers. A lone process asks no other rank.

To save, a coming step is proposed, and training does not wait:

    rank 0, when a save is due:  proposes a step beyond its own
    every rank:                  raises its barrier there, then acknowledges if it has not reached that step yet
    rank 0:                      writes the verdict; unless all have acknowledged, it proposes a later step
    a rank at its barrier:       waits for the verdict (which is there long before), and saves, or goes on

To leave, they find the first step that all can still reach, which is the step that the fastest rank is in:

    rank 0, when any rank asks:  calls for it
    every rank:                  waits at its next step boundary, then tells its step
    rank 0:                      writes the step after the furthest, as soon as all have told
    a rank that waits:           leaves there, or goes on to that step

A step is counted by the calls of due(), which every rank makes alike. Its number may jump and go back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Protocol

import torch.distributed as dist

from holdfast.distributed.ranks import KeyValueStore, Ranks
from holdfast.errors import RanksDisagree

log = logging.getLogger("holdfast")

POLL_SECONDS = 0.25
LEAD_SECONDS = 1.5
"""How far ahead a save is proposed. All ranks see it within POLL_SECONDS; the rest is for slow hosts."""
_HURRY_SECONDS = 0.02
"""How often the ranks poll while they agree to leave."""
_ANSWER_SECONDS = 20.0
_NEVER = math.inf
_AT_ONCE = -1.0
_IN_ORDER = "in order"
_FAILED = "failed"


class Ask(StrEnum):
    """The action after a step."""

    SAVE = "save"
    PREEMPT = "preempt"
    """Save, and leave: the machine is about to be taken away. It outranks SAVE."""


class Outlook(Enum):
    """The state of the request to leave."""

    OPEN = auto()
    """No rank has asked, or not all ranks have answered."""
    AGREED = auto()
    """All ranks leave after the same step."""
    OVER = auto()
    """A rank has ended its job, and comes to no more steps. There is no step to leave after."""
    BROKEN = auto()
    """A rank has failed, and comes to no more steps; or the job's store is gone together with the process that held
    it."""


@dataclass
class _Round:
    """A proposed or agreed step to save after."""

    barrier: int
    decided: threading.Event = field(default_factory=threading.Event)
    go: bool = False
    lost: bool = False


class RanksAgreement:
    """`due` is for the training thread, `request` for any; all else runs on one background thread, started here."""

    def __init__(
        self, ranks: Ranks, store: KeyValueStore, wants: Callable[[], bool], heard: Callable[[str], None]
    ) -> None:
        self._wants = wants
        self._heard = heard
        self._ranks = ranks
        self._store = store
        self._at = -1
        self._measured: tuple[int, float] | None = None
        self._steps_per_second = 0.0
        self._barrier: float = _NEVER
        """The lowest step that may be due or must wait; a step below it returns at once."""
        self._round: _Round | None = None
        self._held: threading.Event | None = None
        self._leave_at: float = _NEVER
        self._lock = threading.Lock()  # guards the four together; a step before the barrier takes no lock
        self._settled = threading.Event()  # a save was agreed on, and has not begun yet
        self._oldest = 0  # the oldest round that is still in the store
        self._asked: dict[Ask, str] = {}
        self._left_as = _IN_ORDER
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.outlook = Outlook.OPEN
        self._thread = threading.Thread(target=self._run, name="holdfast-agreement", daemon=True)
        self._thread.start()

    def due(self, step: int) -> Ask | None:
        """Costs under a microsecond except at an agreed step. Raises RanksDisagree if no verdict comes in time."""
        # The order matters: the background thread raises the barrier before it reads `_at`. The later of the two
        # threads sees the other's value, so that no rank reports a step and then runs past it.
        self._at = at = self._at + 1
        return None if at < self._barrier else self._due_at_barrier(step, at)

    def request(self, ask: Ask, word: str = "") -> None:
        self._asked.setdefault(ask, word)
        self._wake.set()

    def restart(self) -> None:
        self._asked.pop(Ask.SAVE, None)
        self._settled.clear()

    def close(self, *, in_order: bool = True) -> None:
        self._left_as = _IN_ORDER if in_order else _FAILED
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=10 * POLL_SECONDS)

    def _due_at_barrier(self, step: int, at: int) -> Ask | None:
        while (held := self._held) is not None:
            if not held.wait(self._ranks.timeout_seconds):
                raise RanksDisagree(f"No answer came on leaving after step {step}; rank 0 or the job's store has ended")
        if at >= self._leave_at:
            return Ask.PREEMPT
        current = self._round
        if current is None or at < current.barrier:
            return None
        if not current.decided.wait(self._ranks.timeout_seconds) or current.lost:
            raise RanksDisagree(f"No verdict came on saving after step {step}; rank 0 or the job's store has ended")
        if current.go:
            # No save is proposed until restart(): this one would be asked for again.
            self._settled.set()
        self._drop(current)
        return Ask.SAVE if current.go else None

    def _raise_barrier(self) -> None:
        """After any change of what may be due. The caller holds the lock."""
        if self._held is not None:
            self._barrier = _AT_ONCE
        else:
            self._barrier = min(self._leave_at, self._round.barrier if self._round is not None else _NEVER)

    def _drop(self, done: _Round) -> None:
        with self._lock:
            if self._round is done:
                self._round = None
                self._raise_barrier()

    def _run(self) -> None:
        work: Callable[[], None] = self._lead if self._ranks.is_first else self._follow
        try:
            work()
            self._store.set(_left_key(self._ranks.rank), self._left_as)
        except (RuntimeError, dist.DistError) as error:
            if not self._stop.is_set():
                if self.outlook is Outlook.OPEN:
                    self.outlook = Outlook.BROKEN
                log.warning(
                    "the job's store does not answer any more, so nothing is saved by the clock, and each rank is on "
                    "its own when it is told to leave: %s",
                    error,
                )
        finally:
            if (current := self._round) is not None and not current.decided.is_set():
                current.lost = True
                current.decided.set()
            self._let_go(self._leave_at)

    def _lead(self) -> None:
        number, lead_seconds = 0, LEAD_SECONDS
        while not self._stop.is_set():
            self._pause(POLL_SECONDS)
            self._measure_speed()
            if self._is_asked_to_leave(number):
                self._lead_away(number)
                number += 1
            elif self.outlook is Outlook.OPEN and self._is_asked_to_save(number):
                go = self._lead_to_save(number, lead_seconds)
                number, lead_seconds = number + 1, LEAD_SECONDS if go else lead_seconds * 2

    def _is_asked_to_leave(self, number: int) -> bool:
        if self.outlook is not Outlook.OPEN:
            return False
        key = _request_key(number, Ask.PREEMPT)
        if self._store.check([key]):
            self._hear(self._store.get(key).decode())
        return Ask.PREEMPT in self._asked

    def _hear(self, word: str) -> None:
        if self._asked.get(Ask.PREEMPT) != word:
            self._asked.setdefault(Ask.PREEMPT, word)
            self._heard(word)

    def _is_asked_to_save(self, number: int) -> bool:
        if self._round is not None or self._at < 0 or self._settled.is_set():
            return False
        return Ask.SAVE in self._asked or self._wants() or self._store.check([_request_key(number, Ask.SAVE)])

    def _lead_to_save(self, number: int, lead_seconds: float) -> bool:
        barrier = self._at + 1 + math.ceil(self._steps_per_second * lead_seconds)
        self._store.set(f"{number}/call", f"{Ask.SAVE} {barrier}")
        current, reachable = self._propose(barrier)
        keys = [f"{number}/ack/{rank}" for rank in range(1, self._ranks.world_size)]
        # A request to leave must not wait for a rank that is slow to answer.
        answered = self._all_there(keys, unless=lambda: Ask.PREEMPT in self._asked)
        go = reachable and answered and all(self._store.get(key) == b"yes" for key in keys)
        self._store.set(f"{number}/verdict", "go" if go else "no")
        self._decide(current, go=go)
        if answered:
            self._forget_before(number)
        return go

    def _forget_before(self, number: int) -> None:
        """Deletes rounds before `number`: a rank that has answered in this round has read the earlier ones, which were
        about saves. The store is memory of rank 0's host, and a job makes many saves."""
        for done in range(self._oldest, number):
            acks = (f"{done}/ack/{rank}" for rank in range(1, self._ranks.world_size))
            for key in (f"{done}/call", f"{done}/verdict", _request_key(done, Ask.SAVE), *acks):
                self._store.delete_key(key)
        self._oldest = number

    def _lead_away(self, number: int) -> None:
        """One try; it is repeated until all have answered."""
        self._store.set(f"{number}/call", f"{Ask.PREEMPT} {self._asked[Ask.PREEMPT]}")
        furthest = self._hold_up()
        keys = [f"{number}/at/{rank}" for rank in range(1, self._ranks.world_size)]
        if self._all_there(keys, unless=lambda: self._gone() is not None):
            furthest = max(furthest, *(int(self._store.get(key)) for key in keys))
            self._store.set(f"{number}/leave", str(furthest + 1))
            self._leave(furthest + 1)
        elif gone := self._gone():
            self._store.set(f"{number}/leave", gone)
            self._stay(gone)
        else:
            self._store.set(f"{number}/leave", "")
            self._let_go(_NEVER)

    def _gone(self) -> str | None:
        """How another rank has left, if any has; the worst of them."""
        keys = [_left_key(rank) for rank in range(1, self._ranks.world_size)]
        left = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        return max(left, key=lambda how: how == _FAILED, default=None)

    def _follow(self) -> None:
        number = 0
        while self._appears(f"{number}/call", number):
            ask, _, word = self._store.get(f"{number}/call").decode().partition(" ")
            if not (self._follow_away(number, word) if ask == Ask.PREEMPT else self._follow_to_save(number, int(word))):
                return
            number += 1

    def _follow_to_save(self, number: int, barrier: int) -> bool:
        """False if this thread must stop."""
        # Rank 0 has passed the step that was agreed on before; this rank may not have. What is proposed now must not
        # take its place.
        while self._round is not None:
            if self._stop.wait(_HURRY_SECONDS):
                return False
        current, reachable = self._propose(barrier)
        self._store.set(f"{number}/ack/{self._ranks.rank}", "yes" if reachable else "no")
        if not self._appears(f"{number}/verdict"):
            return False
        self._decide(current, go=self._store.get(f"{number}/verdict") == b"go")
        return True

    def _follow_away(self, number: int, word: str) -> bool:
        """False if this thread must stop."""
        self._hear(word)
        self._store.set(f"{number}/at/{self._ranks.rank}", str(self._hold_up()))
        if not self._appears(f"{number}/leave"):
            return False
        leave = self._store.get(f"{number}/leave").decode()
        if leave in (_IN_ORDER, _FAILED):
            self._stay(leave)
        elif leave:
            self._leave(int(leave))
        else:
            self._let_go(_NEVER)
        return True

    def _propose(self, barrier: int) -> tuple[_Round, bool]:
        """Raises the barrier; also returns whether this rank has not come to it yet."""
        current = _Round(barrier)
        with self._lock:
            self._round = current
            self._raise_barrier()
        return current, self._at < barrier

    def _decide(self, current: _Round, *, go: bool) -> None:
        current.go = go
        if not go:
            self._drop(current)
        current.decided.set()

    def _hold_up(self) -> int:
        """Lets no further step pass; returns the step that this rank has come to."""
        with self._lock:
            self._held = self._held or threading.Event()
            self._raise_barrier()
        return self._at

    def _leave(self, at: int) -> None:
        """All ranks leave after that step."""
        self.outlook = Outlook.AGREED
        self._let_go(at)

    def _stay(self, left_as: str) -> None:
        """Another rank comes to no more steps."""
        self.outlook = Outlook.BROKEN if left_as == _FAILED else Outlook.OVER
        self._let_go(_NEVER)

    def _let_go(self, leave_at: float) -> None:
        with self._lock:
            self._leave_at = leave_at
            # An agreed save stands if a rank may be in it already. If not, leaving takes its place: every rank has the
            # same two numbers.
            if self._round is not None and leave_at <= self._round.barrier:
                self._round = None
            held, self._held = self._held, None
            self._raise_barrier()
        if held is not None:
            held.set()

    def _all_there(self, keys: list[str], *, unless: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not self._store.check(keys):
            if self._stop.wait(_HURRY_SECONDS) or unless() or time.monotonic() > deadline:
                return False
        return True

    def _appears(self, key: str, asking_in: int | None = None) -> bool:
        """Waits for the key; False if this thread must stop. It polls, because a blocking wait of torch's store logs
        each time-out. `asking_in`: the round in which this rank's own requests are sent to rank 0 meanwhile."""
        told: set[Ask] = set()
        while not self._store.check([key]):
            if self._stop.is_set():
                return False
            leaving = Ask.PREEMPT in self._asked and self.outlook is Outlook.OPEN
            for ask, word in list(self._asked.items() if asking_in is not None else ()):
                if ask not in told and (ask is Ask.SAVE or leaving):
                    self._store.set(_request_key(asking_in or 0, ask), word)
                    told.add(ask)
            if leaving and self._store.check([_left_key(0)]):
                self._stay(self._store.get(_left_key(0)).decode())
            self._pause(_HURRY_SECONDS if leaving else POLL_SECONDS)
        return True

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _measure_speed(self) -> None:
        at, now = self._at, time.monotonic()
        if self._measured is not None:
            before, then = self._measured
            fresh = max(0, at - before) / max(now - then, 1e-3)
            self._steps_per_second = max(fresh, self._steps_per_second * 0.9)
        self._measured = (at, now)


def _request_key(number: int, ask: Ask) -> str:
    return f"{number}/request/{ask}"


def _left_key(rank: int) -> str:
    return f"left/{rank}"


__all__ = ["Ask", "Outlook", "StepAgreement", "agreement_of"]


class StepAgreement(Protocol):
    """One job's agreement; the same answer for the same step on every rank."""

    @property
    def outlook(self) -> Outlook:
        """The state of the request to leave."""

    def due(self, step: int) -> Ask | None:
        """The action after this step. For the training thread, once after each step; PREEMPT stays the answer."""

    def request(self, ask: Ask, word: str = "") -> None:
        """From any thread of any rank, any number of times. `word` goes to every rank with a request to leave."""

    def restart(self) -> None:
        """The save that was due has begun, or has failed to begin. No other save is due before this call."""

    def close(self, *, in_order: bool = True) -> None:
        """This rank comes to no more steps. Ends the background thread. `in_order`: its job is done; else it failed."""


def agreement_of(
    ranks: Ranks, wants: Callable[[], bool], heard: Callable[[str], None] = lambda _word: None
) -> StepAgreement:
    """The agreement for this world. Not a collective; every rank makes one.

    `wants`: whether a save is due by the clock; asked on rank 0, on a background thread, a few times a second.
    `heard(word)`: another rank has asked to leave; called on a background thread.
    """
    store = ranks.store("agreement")
    return LoneAgreement(wants) if store is None else RanksAgreement(ranks, store, wants, heard)


class LoneAgreement:
    """For a process that is the whole job: its requests are agreed at once."""

    def __init__(self, wants: Callable[[], bool]) -> None:
        self._wants = wants
        self._asked: Ask | None = None
        self._lock = threading.Lock()
        self._look_at = 0.0

    @property
    def outlook(self) -> Outlook:
        return Outlook.AGREED if self._asked is Ask.PREEMPT else Outlook.OPEN

    def due(self, step: int) -> Ask | None:
        if self._asked is not None:
            return self._asked
        if (now := time.monotonic()) < self._look_at:
            return None
        self._look_at = now + POLL_SECONDS
        return Ask.SAVE if self._wants() else None

    def request(self, ask: Ask, word: str = "") -> None:
        with self._lock:
            if self._asked is not Ask.PREEMPT:
                self._asked = ask

    def restart(self) -> None:
        with self._lock:
            if self._asked is Ask.SAVE:
                self._asked = None

    def close(self, *, in_order: bool = True) -> None:
        """Nothing to do: it has no background thread."""
