"""Checks that every rank comes to the vote on the best step. One thread per rank, and only with a Best.

    a rank that waits long in the vote:   writes that vote into the job's store
    a rank that passed without a vote:    takes its training thread's place in it, with the error that all ranks raise

A rank without the metric goes on to its next step. There it may wait for the others, which wait for it in the vote:
without this thread each would wait for its time-out. A vote that all ranks come to costs nothing more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from holdfast.distributed.ranks import KeyValueStore, Question, Ranks
from holdfast.errors import RanksDisagree

log = logging.getLogger("holdfast")

_LOOK_SECONDS = 0.25
_KEY = "waiting"


class VoteWatchdog:
    """`passed` and `voting` are for the training thread: one of the two after each step, on every rank. They count the
    steps."""

    def __init__(self, ranks: Ranks, store: KeyValueStore) -> None:
        self._ranks = ranks
        self._store = store
        self._number = 0
        self._last_vote = 0
        self._passed = (0, 0)
        """The last step without a vote, and how many collectives there were until then."""
        self._waiting: tuple[int, int, str] | None = None
        """The vote that this rank is in: its number, the step, the metric."""
        self._comes = False
        """Whether the thread has taken part in a vote, or is about to; after that it ends."""
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-vote-watchdog", daemon=True)
        self._thread.start()

    def passed(self) -> None:
        """No vote was due here. Raises the other ranks' error, if they had a vote earlier."""
        self._number += 1
        self._passed = (self._number, self._ranks.collectives)
        if self._comes:
            self._thread.join()  # the others may have raised already, so this rank must not begin another step
            if self._error is not None:
                raise self._error

    @contextmanager
    def voting(self, step: int, metric: str) -> Iterator[None]:
        self._number += 1
        self._last_vote = self._number
        self._waiting = (self._number, step, metric)
        try:
            yield
        finally:
            self._waiting = None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10 * _LOOK_SECONDS)

    def _run(self) -> None:
        seen: tuple[int, int, str] | None = None
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                waiting = self._waiting
                if waiting is not None and waiting == seen:
                    self._store.set(_KEY, " ".join(map(str, waiting)))
                elif waiting is None and self._store.check([_KEY]):
                    number, step, metric = self._store.get(_KEY).decode().split(" ", 2)
                    if self._last_vote < int(number) <= self._passed[0]:
                        self._come(int(step), metric)
                        return
                seen = waiting
        except (RuntimeError, dist.DistError):
            return  # the store ended with the job; the agreement's thread reports it

    def _come(self, step: int, metric: str) -> None:
        missing = RanksDisagree(
            f"metrics[{metric!r}] was not passed to step() on rank {self._ranks.rank} at step {step}, and on others it "
            "was. Best(…) needs it on every rank, at the same steps"
        )
        self._comes = True
        self._error = self._ranks.stand_in(
            lambda: self._ranks.first_says(step, Question.IS_BEST, yes=False, error=missing), since=self._passed[1]
        )
        if self._error is not None:
            log.error("%s", self._error)
