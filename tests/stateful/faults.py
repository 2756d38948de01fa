"""A crash or a lost reply at each step of a call, and the retry that a client makes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from tests.support.rank import Refused

Result = TypeVar("Result")


@dataclass(frozen=True)
class Fault:
    """`crash_at`: the service dies just before its n-th commit of the call. `reply_lost`: it did all, nobody heard."""

    crash_at: int | None = None
    reply_lost: bool = False


faults = strategies.sampled_from(
    [Fault(), Fault(), Fault(reply_lost=True), Fault(crash_at=1), Fault(crash_at=2), Fault(crash_at=3)]
)


class FaultyDatabase:
    """Loses one transaction, as a killed service or database would. The work of earlier ones stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commits_left: int | None = None

    def __enter__(self) -> FaultyDatabase:
        event.listen(Session, "before_commit", self._before_commit)
        return self

    def __exit__(self, *_: Any) -> None:
        event.remove(Session, "before_commit", self._before_commit)

    def attempt(self, fault: Fault, call: Callable[[], Result]) -> Result | None:
        """The call with its fault; None if the caller does not learn the outcome."""
        with self._lock:
            self._commits_left = fault.crash_at
        try:
            result = call()
        except Refused as problem:
            if problem.code != "database_unavailable":
                raise
            return None
        finally:
            with self._lock:
                self._commits_left = None
        return None if fault.reply_lost else result

    def retried(self, fault: Fault, call: Callable[[], Result]) -> Result:
        """With its fault, and again until the outcome is known: so must be the same as once."""
        result = self.attempt(fault, call)
        return call() if result is None else result

    def _before_commit(self, _session: Session) -> None:
        with self._lock:
            if self._commits_left is None:
                return
            self._commits_left -= 1
            if self._commits_left:
                return
            self._commits_left = None
        raise OperationalError("COMMIT", {}, Exception("the server closed the connection unexpectedly"))
