"""The recommended interval of a run, from the catalog; kept for a minute, for each heartbeat asks.

Each process keeps its own: nothing is lost with it, and two that differ for a minute do no harm.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from holdfast_service.catalog.save_history import read_measured, read_pool
from holdfast_service.catalog.save_interval import Bounds, Measured, Pool, Recommendation, recommend
from holdfast_service.catalog.tables import Run
from holdfast_service.database import Database
from holdfast_service.settings import ServiceSettings

_RUN_SECONDS = 60.0
_FLEET_SECONDS = 600.0
_MOST_RUNS = 10_000


@dataclass
class SaveAdvice:
    """Of one process; for any thread."""

    settings: ServiceSettings
    database: Database
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Run id -> when it was worked out, and the interval."""
    _fleet: tuple[float, Pool] | None = None

    def interval_seconds(self, run_id: str) -> float:
        """Worked out at most once a minute for each run."""
        now = time.monotonic()
        with self._lock:
            known = self._intervals.get(run_id)
        if known is not None and now - known[0] < _RUN_SECONDS:
            return known[1]
        with self.database.read() as session:
            return self.explained(session, session.get_one(Run, run_id))[1].interval_seconds

    def explained(self, session: Session, run: Run) -> tuple[Measured, Recommendation]:
        """Worked out now, but for what the fleet went through."""
        measured = read_measured(session, run, self._pool_of_fleet(session))
        found = recommend(measured, bounds_of(self.settings))
        with self._lock:
            if len(self._intervals) >= _MOST_RUNS:
                self._intervals.clear()
            self._intervals[run.id] = (time.monotonic(), found.interval_seconds)
        return measured, found

    def _pool_of_fleet(self, session: Session) -> Pool:
        now = time.monotonic()
        with self._lock:
            known = self._fleet
        if known is not None and now - known[0] < _FLEET_SECONDS:
            return known[1]
        pool = read_pool(session)
        with self._lock:
            self._fleet = (now, pool)
        return pool


def bounds_of(settings: ServiceSettings) -> Bounds:
    return Bounds(
        default_seconds=settings.save_interval_seconds,
        shortest_seconds=min(settings.shortest_save_interval_seconds, settings.save_interval_seconds),
        longest_seconds=max(settings.longest_save_interval_seconds, settings.save_interval_seconds),
    )
