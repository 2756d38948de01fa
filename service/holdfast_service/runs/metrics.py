"""The catalog's own numbers, read for `/metrics`: true for all processes together, and across restarts.

Every process shows the same values, so dashboards take `max`, not `sum`. They are read at most once in CACHE_SECONDS,
however many scrapers come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.operations import ForgottenTotal
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.restore_choice import newest_restore_points
from holdfast_service.runs.views import MOST_RUNS_TOLD, live_runs
from holdfast_service.tallies.sums import Sums, stored_bytes, sums_of_projects

CACHE_SECONDS = 10.0


@dataclass(frozen=True)
class _ProjectNumbers:
    """`forgotten`: what the checkpoints were whose rows are gone."""

    name: str
    stored_bytes: int
    sums: Sums
    forgotten: ForgottenTotal | None

    def ever(self, name: str) -> int:
        """Of all checkpoints that there ever were: a column of ForgottenTotal."""
        gone = 0 if self.forgotten is None else getattr(self.forgotten, name)
        return int(gone + getattr(self.sums, f"ever_{name}"))


@dataclass(frozen=True)
class _Numbers:
    projects: tuple[_ProjectNumbers, ...]
    restore_point_age_seconds: dict[tuple[str, str], float]  # by project and run


class CatalogNumbers(Collector):
    """Registered once per application."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._numbers: _Numbers | None = None

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the catalog."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        numbers = self._current()
        up = GaugeMetricFamily("holdfast_catalog_up", "1 if the catalog's numbers could be read.")
        up.add_metric([], 0 if numbers is None else 1)
        yield up
        if numbers is not None:
            yield from _families(numbers)

    def _current(self) -> _Numbers | None:
        with self._lock:
            if time.monotonic() - self._read_at >= CACHE_SECONDS:
                try:
                    with self._database.read() as session:
                        self._numbers = _read(session)
                except ProblemError:  # the process's own metrics must still be shown
                    self._numbers = None
                self._read_at = time.monotonic()
            return self._numbers


def _families(numbers: _Numbers) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "holdfast_checkpoints", "Checkpoints that were committed or aborted.", labels=("project", "outcome")
    )
    moved = CounterMetricFamily(
        "holdfast_checkpoint_bytes",
        "Of all checkpoints that were ever committed: negotiated (the chunks that they need), uploaded (what was sent, "
        "as it is stored), deduplicated (what was not sent, because it was there).",
        labels=("project", "kind"),
    )
    uploading = GaugeMetricFamily("holdfast_checkpoints_uploading", "Checkpoints in the making.", labels=("project",))
    stored = GaugeMetricFamily("holdfast_stored_bytes", "Bytes in the store.", labels=("project",))
    logical = GaugeMetricFamily(
        "holdfast_logical_bytes", "Bytes of the states that committed checkpoints hold now.", labels=("project",)
    )
    deduplicated = GaugeMetricFamily(
        "holdfast_deduplicated_bytes",
        "Bytes that the checkpoints that are committed now did not send, because they were there.",
        labels=("project",),
    )
    for project in numbers.projects:
        ended.add_metric([project.name, "committed"], project.ever("committed"))
        ended.add_metric([project.name, "aborted"], project.ever("aborted"))
        moved.add_metric([project.name, "negotiated"], project.ever("chunk_bytes"))
        moved.add_metric([project.name, "uploaded"], project.ever("uploaded_bytes"))
        moved.add_metric([project.name, "deduplicated"], project.ever("deduplicated_bytes"))
        uploading.add_metric([project.name], project.sums.uploading)
        stored.add_metric([project.name], project.stored_bytes)
        logical.add_metric([project.name], project.sums.logical_bytes)
        deduplicated.add_metric([project.name], project.sums.deduplicated_bytes)
    age = GaugeMetricFamily(
        "holdfast_restore_point_age_seconds",
        f"Age of the newest restore point of each run whose newest attempt has not ended: of the {MOST_RUNS_TOLD} that "
        "were opened last.",
        labels=("project", "run"),
    )
    for (project_name, run_name), seconds in numbers.restore_point_age_seconds.items():
        age.add_metric([project_name, run_name], seconds)
    yield from (ended, moved, uploading, stored, logical, deduplicated, age)


def _read(session: Session) -> _Numbers:
    names = dict(session.execute(select(Project.id, Project.name).where(Project.purged_at.is_(None))).all())
    sizes = stored_bytes(session, names)
    sums = sums_of_projects(session, names)
    # Rows that are gone were counted with these, in the transaction that took them away.
    forgotten = {gone.project_id: gone for gone in session.scalars(select(ForgottenTotal))}
    projects = tuple(
        _ProjectNumbers(name, sizes[project_id], sums[project_id], forgotten.get(project_id))
        for project_id, name in sorted(names.items(), key=lambda item: item[1])
    )
    return _Numbers(projects, _ages(session, database_now(session)))


def _ages(session: Session, now: datetime) -> dict[tuple[str, str], float]:
    """Only of runs that are being trained: how far back they would fall now. The others need no alarm."""
    active = session.execute(live_runs()).all()
    points = newest_restore_points(session, [run_id for run_id, *_ in active])
    return {
        (project_name, run_name): max(0.0, (now - points[run_id].committed_at).total_seconds())
        for run_id, project_name, run_name in active
        if run_id in points
    }
