"""One verdict of all ranks on work that their background threads do: it went well on all of them, or all get one error.

    each rank:  does its work, and writes into the job's store how that ended
    rank 0:     waits for all, confirms, and writes the verdict
    the others: wait for the verdict

The training threads take no part, and may be anywhere: in a backward pass, or in a collective of their own. A rank that
has died writes nothing; the others wait no longer for it than for any collective, from the last sign that some rank is
at work.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from holdfast.distributed.ranks import Failure, KeyValueStore, Ranks
from holdfast.errors import HoldfastError, RankLost

_WAIT = timedelta(seconds=1)
"""A wait in the store cannot be called off: so long a rank that must stop does not hear of it."""
_VERDICT = "verdict"
_SIGNS = "signs"
_SIGNS_A_TIMEOUT = 10
ENDED = "This rank has ended, or has begun something else, before all ranks had come so far"
"""Of the RankLost that a rank gives the others if it is stopped."""


class BackgroundVerdict:
    """One rank's part in one verdict. Made on the training thread of every rank; one background thread uses it."""

    def __init__(self, ranks: Ranks, purpose: str) -> None:
        """`purpose`: of this verdict alone, and the same on all ranks."""
        self._ranks = ranks
        self._store = ranks.store(purpose)
        self._shows_life_at = 0.0

    def show_life(self) -> None:
        """While this rank is at work, before reach(): the others wait on. From any thread, as often as one likes."""
        if self._store is not None and time.monotonic() > self._shows_life_at:
            self._shows_life_at = time.monotonic() + self._ranks.timeout_seconds / _SIGNS_A_TIMEOUT
            with suppress(RuntimeError, dist.DistError):  # reach() says so
                self._store.add(_SIGNS, 1)

    def reach(
        self, own: BaseException | None, confirm: Callable[[], object], stop: threading.Event
    ) -> BaseException | None:
        """None if it went well on all ranks, and if rank 0's `confirm` did; else the error of the lowest failing rank,
        on every rank. `own`: this rank's error. Never raises. With `stop` set, this rank waits no more.

        RankLost if no rank shows life within the ranks' time-out, or the store is gone."""
        try:
            if self._store is None:
                return own or _error_of(confirm)
            return self._reach(self._store, own, confirm, stop)
        except (RuntimeError, dist.DistError) as error:
            return own or RankLost(f"The job's store does not answer any more ({error})")

    def _reach(
        self, store: KeyValueStore, own: BaseException | None, confirm: Callable[[], object], stop: threading.Event
    ) -> BaseException | None:
        store.set(str(self._ranks.rank), _sent(own))
        if self._ranks.is_first:
            rank, error = self._decide(store, own, confirm, stop)
            store.set(_VERDICT, f"{rank} {_sent(error)}")
            return error
        if not self._appear(store, [_VERDICT], stop):
            return own or RankLost("Rank 0 did not say in time whether all ranks had come so far")
        rank_text, _, sent = store.get(_VERDICT).decode().partition(" ")
        failure = _received(sent)
        if failure is None:
            return None
        return own if own is not None and int(rank_text) == self._ranks.rank else failure.rebuild(int(rank_text))

    def _decide(
        self, store: KeyValueStore, own: BaseException | None, confirm: Callable[[], object], stop: threading.Event
    ) -> tuple[int, BaseException | None]:
        """On rank 0: the lowest failing rank, and its error."""
        keys = [str(rank) for rank in range(1, self._ranks.world_size)]
        are_there = self._appear(store, keys, stop)
        if own is not None:
            return 0, own
        for rank, key in enumerate(keys, start=1):
            if not store.check([key]):
                continue
            failure = _received(store.get(key).decode())
            if failure is not None:
                return rank, failure.rebuild(rank)
        if stop.is_set():
            return 0, RankLost(ENDED)
        if not are_there:
            lost = [key for key in keys if not store.check([key])]
            return 0, RankLost(f"Rank {', '.join(lost)} did not say in time whether it had come so far")
        return 0, _error_of(confirm)

    def _appear(self, store: KeyValueStore, keys: list[str], stop: threading.Event) -> bool:
        """Waits for the keys, in the store: a thousand ranks that asked again and again would be a load for rank 0.
        False if that takes too long, or this rank must stop."""
        signs, deadline = store.add(_SIGNS, 0), time.monotonic() + self._ranks.timeout_seconds
        while not store.check(keys):
            if time.monotonic() > deadline and (now := store.add(_SIGNS, 0)) > signs:
                signs, deadline = now, time.monotonic() + self._ranks.timeout_seconds
            if stop.is_set() or time.monotonic() > deadline:
                return False
            with suppress(dist.DistStoreError):  # they are not there yet
                store.wait(keys, _WAIT)
        return True


def _error_of(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:  # on a background thread: the training thread raises it
        return error
    return None


def _sent(error: BaseException | None) -> str:
    if error is None:
        return ""
    told = error if isinstance(error, Exception) else HoldfastError(f"{type(error).__name__}: {error}")
    return base64.b64encode(pickle.dumps(Failure.of(told))).decode()


def _received(sent: str) -> Failure | None:
    # As in a collective, it comes from a rank of this job.
    failure: Failure | None = pickle.loads(base64.b64decode(sent)) if sent else None  # noqa: S301
    return failure
