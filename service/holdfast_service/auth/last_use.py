"""When a token was last used: each process writes it down now and then, and no call waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import inf

from sqlalchemy import update
from sqlalchemy.orm import Session

from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Token

EVERY_SECONDS = 300.0
"""A token that calls all the time costs one statement in so long, in each process."""


class TokensUsed:
    """Thread-safe. What this process has let in and not written down yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._new: set[str] = set()
        self._written_at: dict[str, float] = {}

    def add(self, token_id: str) -> None:
        with self._lock:
            if self._clock() - self._written_at.get(token_id, -inf) >= EVERY_SECONDS:
                self._new.add(token_id)

    def write_down(self, database: Database) -> int:
        """How many tokens. Raises ProblemError; they are written the next time then."""
        with self._lock:
            new = sorted(self._new)
        if not new:
            return 0
        database.run(lambda session: _write(session, new))
        with self._lock:
            now = self._clock()
            self._new.difference_update(new)
            lately = {token_id: at for token_id, at in self._written_at.items() if now - at < EVERY_SECONDS}
            self._written_at = lately | dict.fromkeys(new, now)
        return len(new)


def _write(session: Session, token_ids: Sequence[str]) -> None:
    session.execute(
        update(Token).where(Token.id.in_(token_ids)).values(last_used_at=database_now(session)),
        execution_options={"synchronize_session": False},
    )
