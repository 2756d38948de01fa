"""What `/metrics` tells of the catalog: read once in a while, however many scrapers come.

A small catalog is told as it is now. A large one costs its database at most a twentieth of the time, and what is told
is LONGEST_SECONDS old at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from sqlalchemy.orm import Session

from holdfast_service.db.engine import Database
from holdfast_service.errors import ProblemError

LONGEST_SECONDS = 30.0
_KEPT_FOR = 20
"""As many times as long as the read took."""

Read = TypeVar("Read")


class CachedRead(Generic[Read]):
    """`unavailable`: what is told while the catalog cannot be read. The process's own metrics are shown in any case."""

    def __init__(self, database: Database, read: Callable[[Session], Read], unavailable: Read) -> None:
        self._database = database
        self._read = read
        self._unavailable = self._told = unavailable
        self._lock = threading.Lock()
        self._good_until = float("-inf")

    def __call__(self) -> Read:
        with self._lock:
            began = time.monotonic()
            if began >= self._good_until:
                try:
                    # What moves from one table to another between two statements must count once.
                    with self._database.read(snapshot=True) as session:
                        self._told = self._read(session)
                except ProblemError:
                    self._told = self._unavailable
                ended = time.monotonic()
                self._good_until = ended + min(LONGEST_SECONDS, _KEPT_FOR * (ended - began))
            return self._told
