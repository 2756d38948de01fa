"""Slows down who calls with wrong tokens: each costs a question to the database.

An address may fail BURST times, and then once in SECONDS_PER_FAILURE. A token that was good lately is still asked for:
behind one address may be a whole cluster, and one job's old token must not stop the training of the others. Kept by
each process for itself, in memory.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from math import ceil
from typing import TypeVar

from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.errors import ProblemError

BURST = 20
SECONDS_PER_FAILURE = 3.0
_MOST_KEPT = 10_000

KeptT = TypeVar("KeptT")


class FailedCalls:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By address, when its failures will all be forgotten: each adds SECONDS_PER_FAILURE to what is left.
        self._forgotten_at: OrderedDict[str, float] = OrderedDict()
        self._good: OrderedDict[str, Principal] = OrderedDict()

    def authenticated(self, address: str, token: str, ask: Callable[[str], Principal]) -> Principal:
        """`ask(token)`, counted. Raises `too_many_failures` before it, where this address has used up its tries."""
        fingerprint = _fingerprint(token)
        self._check(address, fingerprint)
        try:
            caller = ask(token)
        except ProblemError as error:
            if error.code is ProblemCode.UNAUTHENTICATED:
                self._failed(address, fingerprint)
            raise
        with self._lock:
            _keep(self._good, fingerprint, caller)
        return caller

    def last_known(self, token: str) -> Principal | None:
        """Who came with this token when it was last looked at; None: nobody, or it was not good."""
        with self._lock:
            return self._good.get(_fingerprint(token))

    def _check(self, address: str, fingerprint: str) -> None:
        with self._lock:
            left = self._forgotten_at.get(address, 0.0) - self._clock()
            if left <= (BURST - 1) * SECONDS_PER_FAILURE or fingerprint in self._good:
                return
        wait = ceil(left - (BURST - 1) * SECONDS_PER_FAILURE)
        raise ProblemError(
            ProblemCode.TOO_MANY_FAILURES,
            f"Too many calls from {address} had a token that is not valid. Correct HOLDFAST_TOKEN there; the next try "
            f"is looked at in {wait} s.",
            retry_after_seconds=wait,
        )

    def _failed(self, address: str, fingerprint: str) -> None:
        with self._lock:
            self._good.pop(fingerprint, None)
            now = self._clock()
            _keep(self._forgotten_at, address, max(now, self._forgotten_at.get(address, now)) + SECONDS_PER_FAILURE)


def _fingerprint(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _keep(kept: OrderedDict[str, KeptT], key: str, value: KeptT) -> None:
    """The newest `_MOST_KEPT` of them: neither addresses nor tokens of strangers fill the memory."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _MOST_KEPT:
        kept.popitem(last=False)
