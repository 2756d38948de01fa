"""What all ranks do after the same step, though only one has asked for it: save by the clock, or save and leave.

    any thread of any rank -> request(Ask) ~~ background threads agree on a step ~~> due(step) on every training thread

Asking all ranks at every step would cost a collective per step. So background threads agree through the job's
key-value store (ranks_agreement.py), and a step costs a comparison of two numbers. A lone process has nobody to ask.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from holdfast.ranks import Ranks
from holdfast.ranks_agreement import POLL_SECONDS, Ask, Outlook, RanksAgreement

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
