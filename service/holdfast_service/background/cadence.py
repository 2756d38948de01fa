"""When a controller's thread looks again: soon while there is work, seldom while there is none.

Each pass that finds nothing doubles the pause before the next one, up to the controller's `longest_pauses`. What
becomes due by time alone is found so much later. What people and jobs change is not: one thread of each process asks
every `look_seconds` whether an acknowledged change was made since, by any process, and whether a person wants a pass.
"""

from __future__ import annotations

import threading
import time

import structlog
from sqlalchemy import func, select

from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.operations import Controller
from holdfast_service.db.tables.records import HistoryMark
from holdfast_service.errors import ProblemError

_WANTED = select(func.aggregate_strings(Controller.name, ",")).where(Controller.run_requested_at.is_not(None))
# Each acknowledged change moves a mark of its process (`db/engine.py`).
_LOOK = select(select(func.sum(HistoryMark.number)).scalar_subquery(), _WANTED.scalar_subquery())

_log = structlog.get_logger("holdfast.background")


class Pause:
    """Of one thread, between its passes. Pure."""

    def __init__(self, shortest_seconds: float, longest_seconds: float) -> None:
        self._shortest_seconds = shortest_seconds
        self._longest_seconds = max(shortest_seconds, longest_seconds)
        self.seconds = shortest_seconds

    def next(self, *, idle: bool) -> float:
        """After a pass that found something, or nothing."""
        self.seconds = min(2 * self.seconds, self._longest_seconds) if idle else self._shortest_seconds
        return self.seconds

    def reset(self) -> float:
        self.seconds = self._shortest_seconds
        return self.seconds


class Changes:
    """What was changed, and which passes people want, as far as this process knows. One for its threads."""

    def __init__(self, context: ServiceContext, look_seconds: float) -> None:
        self._context = context
        self._look_seconds = look_seconds
        self._news = threading.Condition()
        self._marks: int | None = None
        self._looks = 0
        self._wanted: frozenset[str] = frozenset()
        self.count = 0
        """How often a change was noticed."""
        self._thread = threading.Thread(target=self._run, name="holdfast-changes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self) -> None:
        """A pass has settled something: what follows may be another controller's work."""
        with self._news:
            self.count += 1
            self._news.notify_all()

    def wait(self, name: str, pause: Pause, due_at: float, since: int) -> float:
        """Until a controller's next pass is due; until a person wants one; or until the process is asked to stop. A
        change after `count` was `since` shortens the pause. Returns when it is due now."""
        with self._news:
            looks, began_at = self._looks, time.monotonic()
            while not self._context.stopping.is_set():
                if self.count != since:
                    since, due_at = self.count, min(due_at, began_at + pause.reset())
                wanted = name in self._wanted and self._looks != looks
                left = due_at - time.monotonic()
                if wanted or left <= 0:
                    break
                self._news.wait(left)
            return due_at

    def _run(self) -> None:
        while not self._context.stopping.wait(self._look_seconds):
            try:
                self._look()
            except ProblemError as error:  # the database is unavailable
                _log.warning("changes_not_read", error=error.detail)
            except Exception:
                _log.exception("changes_not_read")
        with self._news:
            self._news.notify_all()

    def _look(self) -> None:
        with self._context.database.read(in_transaction=False) as session:
            marks, wanted = session.execute(_LOOK).one()
        with self._news:
            self._looks += 1
            self._wanted = frozenset(wanted.split(",")) if wanted else frozenset()
            if marks != self._marks:
                self._marks = marks
                self.count += 1
            self._news.notify_all()
