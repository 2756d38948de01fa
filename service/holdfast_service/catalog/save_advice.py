"""The recommended interval of a run, from the catalog; kept for a minute, for each heartbeat asks. What its project's
runs and all others went through is kept for longer: it changes slowly, and is read from many rows.

Each process keeps its own: nothing is lost with it, and two that differ for a minute do no harm.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from holdfast_service.catalog.save_history import Others, read_measured, read_others
from holdfast_service.catalog.save_interval import Bounds, Measured, Recommendation, recommend
from holdfast_service.catalog.tables import Run
from holdfast_service.database import Database
from holdfast_service.settings import ServiceSettings

_RUN_SECONDS = 60.0
_OTHERS_SECONDS = 600.0
_MOST_KEPT = 10_000


@dataclass
class SaveAdvice:
    """Of one process; for any thread."""

    settings: ServiceSettings
    database: Database
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Run id -> when it was worked out, and the interval."""
    _others: dict[str | None, tuple[float, Others]] = field(default_factory=dict)
    """Project id, or None for the fleet -> when it was read, and what."""

    def interval_seconds(self, run_id: str) -> float:
        """Worked out at most once a minute for each run."""
        now = time.monotonic()
        with self._lock:
            known = self._intervals.get(run_id)
        if known is not None and now - known[0] < _RUN_SECONDS:
            return known[1]
        with self.database.read() as session:
            run = session.get_one(Run, run_id)
            return self._worked_out(session, run, self._kept(session, run.project_id))[1].interval_seconds

    def explained(self, session: Session, run: Run) -> tuple[Measured, Recommendation]:
        """Worked out now, but for what the fleet went through."""
        return self._worked_out(session, run, self._read(session, run.project_id))

    def _worked_out(self, session: Session, run: Run, project: Others) -> tuple[Measured, Recommendation]:
        measured = read_measured(session, run, project, self._kept(session, None))
        found = recommend(measured, bounds_of(self.settings))
        with self._lock:
            if len(self._intervals) >= _MOST_KEPT:
                self._intervals.clear()
            self._intervals[run.id] = (time.monotonic(), found.interval_seconds)
        return measured, found

    def _kept(self, session: Session, project_id: str | None) -> Others:
        with self._lock:
            known = self._others.get(project_id)
        if known is not None and time.monotonic() - known[0] < _OTHERS_SECONDS:
            return known[1]
        return self._read(session, project_id)

    def _read(self, session: Session, project_id: str | None) -> Others:
        others = read_others(session, project_id)
        with self._lock:
            if len(self._others) >= _MOST_KEPT:
                self._others.clear()
            self._others[project_id] = (time.monotonic(), others)
        return others


def bounds_of(settings: ServiceSettings) -> Bounds:
    return Bounds(
        default_seconds=settings.save_interval_seconds,
        shortest_seconds=min(settings.shortest_save_interval_seconds, settings.save_interval_seconds),
        longest_seconds=max(settings.longest_save_interval_seconds, settings.save_interval_seconds),
    )
