"""What all ranks agree on in the background: threads, one per rank, that meet in the job's key-value store."""

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

# The agreement of several ranks: background threads, one per rank, that meet in the job's key-value store.
#
# To save, a step ahead is proposed, and nobody waits:
#
#     rank 0, when a save is due:  proposes a step that lies beyond the step it is at
#     every rank:                  raises its barrier there, then acknowledges if it has not reached that step yet
#     rank 0:                      writes the verdict: all acknowledged, or not, and it proposes again, further ahead
#     a rank at its barrier:       waits for the verdict (which is there long before), and saves, or goes on
#
# To leave, the first step that all can still reach is found, and that is the one which the fastest is in:
#
#     rank 0, when any rank asks:  calls for it
#     every rank:                  holds its next step up, then tells how far it has come
#     rank 0:                      writes the step after the furthest, as soon as all have told
#     a rank that is held up:      leaves there, or goes on to it
#
# A step is counted by the calls of due(), which every rank makes alike, and not by its number: that may jump and go
# back.

log = logging.getLogger("holdfast")

POLL_SECONDS = 0.25
LEAD_SECONDS = 1.5
"""How far ahead a save is proposed. All ranks see it within POLL_SECONDS; the rest is for slow hosts."""
_HURRY_SECONDS = 0.02
"""Who is to leave looks so often."""
_ANSWER_SECONDS = 20.0
_NEVER = math.inf
_AT_ONCE = -1.0
_IN_ORDER = "in order"
_FAILED = "failed"


class Ask(StrEnum):
    """What to do after a step."""

    SAVE = "save"
    PREEMPT = "preempt"
    """Save, and leave: the machine is about to be taken away. It outranks SAVE."""


class Outlook(Enum):
    """Of the request to leave."""

    OPEN = auto()
    """Nobody has asked, or not all ranks have answered."""
    AGREED = auto()
    """All ranks leave after the same step."""
    OVER = auto()
    """A rank comes to no more steps: it is at the end of its job. There is no step to leave after."""
    BROKEN = auto()
    """A rank comes to no more steps, for it has failed; or the job's store is gone, and with it whoever held it."""


@dataclass
class _Round:
    """A step at which to save, proposed or agreed."""

    barrier: int
    decided: threading.Event = field(default_factory=threading.Event)
    go: bool = False
    lost: bool = False


class RanksAgreement:
    """`due` is the training thread's, `request` anyone's; all else runs on one background thread, started here."""

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
        """The lowest step that may be due, or that is held up; a step below it is looked at no further."""
        self._round: _Round | None = None
        self._held: threading.Event | None = None
        self._leave_at: float = _NEVER
        self._lock = threading.Lock()  # of the four together; a step that is not at the barrier takes none
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
        """Costs under a microsecond except at an agreed step. Raises RanksDisagree where no verdict comes in time."""
        # The order matters: `_raise_barrier` sets the barrier before anyone reads `_at`. Whichever of the two threads
        # comes second sees what the other one wrote, so that no rank tells of a step which it runs past.
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
            # Nothing is proposed until restart(): the others may still be on their way to this barrier, and a second
            # one would take its place.
            self._settled.set()
        self._drop(current)
        return Ask.SAVE if current.go else None

    def _raise_barrier(self) -> None:
        """With the lock: after any change of what may be due."""
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
        # A request to leave does not wait for a rank that is slow to answer.
        answered = self._all_there(keys, unless=lambda: Ask.PREEMPT in self._asked)
        go = reachable and answered and all(self._store.get(key) == b"yes" for key in keys)
        self._store.set(f"{number}/verdict", "go" if go else "no")
        self._decide(current, go=go)
        if answered:
            self._forget_before(number)
        return go

    def _forget_before(self, number: int) -> None:
        """Who has answered in this round has read all of the earlier ones; they were about saves. The store is memory
        of rank 0's host, and a job makes many saves."""
        for done in range(self._oldest, number):
            acks = (f"{done}/ack/{rank}" for rank in range(1, self._ranks.world_size))
            for key in (f"{done}/call", f"{done}/verdict", _request_key(done, Ask.SAVE), *acks):
                self._store.delete_key(key)
        self._oldest = number

    def _lead_away(self, number: int) -> None:
        """One try: it is made again as long as not all have answered."""
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
        """How another rank has left, if any has; the worst."""
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
        """False if we stop."""
        current, reachable = self._propose(barrier)
        self._store.set(f"{number}/ack/{self._ranks.rank}", "yes" if reachable else "no")
        if not self._appears(f"{number}/verdict"):
            return False
        self._decide(current, go=self._store.get(f"{number}/verdict") == b"go")
        return True

    def _follow_away(self, number: int, word: str) -> bool:
        """False if we stop."""
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
        """Raises the barrier; then whether this rank has still to come to it."""
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
        """Lets no step pass any more; then the step that this rank has come to."""
        with self._lock:
            self._held = self._held or threading.Event()
            self._raise_barrier()
        return self._at

    def _leave(self, at: int) -> None:
        """All ranks leave after that step."""
        self.outlook = Outlook.AGREED
        self._let_go(at)

    def _stay(self, left_as: str) -> None:
        """Another rank has no more steps."""
        self.outlook = Outlook.BROKEN if left_as == _FAILED else Outlook.OVER
        self._let_go(_NEVER)

    def _let_go(self, leave_at: float) -> None:
        with self._lock:
            self._leave_at = leave_at
            # A save that was agreed on stands where a rank may be in it already. Else leaving takes its place: every
            # rank has the same two numbers.
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
        """Waits for the key; False if we stop. By asking: a blocking wait of torch's store logs each time-out.
        `asking_in`: the round for which this rank's own requests are handed to rank 0 meanwhile."""
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


# What all ranks do after the same step, though only one has asked for it: save by the clock, or save and leave.
#
#     any thread of any rank -> request(Ask) ~~ background threads agree ~~> due(step) on every training thread
#
# Asking all ranks at every step would cost a collective per step. So background threads agree through the job's
# key-value store, and a step costs a comparison of two numbers. A lone process has nobody to ask.

__all__ = ["Ask", "Outlook", "StepAgreement", "agreement_of"]


class StepAgreement(Protocol):
    """Of one job; the same answer for the same step on every rank."""

    @property
    def outlook(self) -> Outlook:
        """What has become of the request to leave."""

    def due(self, step: int) -> Ask | None:
        """What to do after this step. For the training thread, once after each step; PREEMPT stays the answer."""

    def request(self, ask: Ask, word: str = "") -> None:
        """From any thread of any rank, as often as one likes. `word` goes to every rank with a request to leave."""

    def restart(self) -> None:
        """The save that was due has begun, or has failed to. Before this no other is due."""

    def close(self, *, in_order: bool = True) -> None:
        """This rank comes to no more steps. Ends the background thread. `in_order`: its job is done; else it failed."""


def agreement_of(
    ranks: Ranks, wants: Callable[[], bool], heard: Callable[[str], None] = lambda _word: None
) -> StepAgreement:
    """The agreement for this world. Not a collective; every rank makes one.

    `wants`: whether a save is due by the clock; asked on rank 0, on some thread, some times a second.
    `heard(word)`: another rank has asked to leave; called on a background thread.
    """
    store = ranks.store("agreement")
    return LoneAgreement(wants) if store is None else RanksAgreement(ranks, store, wants, heard)


class LoneAgreement:
    """For a process that is the whole job: what it asks for is agreed."""

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
        """Nothing runs in the background."""
