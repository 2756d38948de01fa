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
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.runs import Latest
from holdfast_protocol.states import CheckpointState
from holdfast_service.copies.stored_bytes import CommittedBytes, committed_bytes, stored_bytes
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run
from holdfast_service.db.tables.operations import ForgottenTotal
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.restore_choice import choose_restore_point

CACHE_SECONDS = 10.0


@dataclass(frozen=True)
class _ProjectNumbers:
    name: str
    committed: int
    aborted: int
    uploading: int
    needed_bytes: int
    uploaded_bytes: int
    deduplicated_bytes: int
    stored_bytes: int
    held: CommittedBytes


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
        ended.add_metric([project.name, "committed"], project.committed)
        ended.add_metric([project.name, "aborted"], project.aborted)
        moved.add_metric([project.name, "negotiated"], project.needed_bytes)
        moved.add_metric([project.name, "uploaded"], project.uploaded_bytes)
        moved.add_metric([project.name, "deduplicated"], project.deduplicated_bytes)
        uploading.add_metric([project.name], project.uploading)
        stored.add_metric([project.name], project.stored_bytes)
        logical.add_metric([project.name], project.held.logical)
        deduplicated.add_metric([project.name], project.held.deduplicated)
    age = GaugeMetricFamily(
        "holdfast_restore_point_age_seconds",
        "Age of the newest restore point of each run whose newest attempt has not ended.",
        labels=("project", "run"),
    )
    for (project_name, run_name), seconds in numbers.restore_point_age_seconds.items():
        age.add_metric([project_name, run_name], seconds)
    yield from (ended, moved, uploading, stored, logical, deduplicated, age)


def _read(session: Session) -> _Numbers:
    names = dict(session.execute(select(Project.id, Project.name).where(Project.purged_at.is_(None))).all())
    sizes = stored_bytes(session, names)
    held = committed_bytes(session, names)
    counted = session.execute(
        select(
            Run.project_id,
            func.count(Checkpoint.committed_at),
            func.count(Checkpoint.aborted_at),
            func.count().filter(Checkpoint.state == CheckpointState.UPLOADING),
            func.sum(Checkpoint.chunk_bytes).filter(Checkpoint.committed_at.is_not(None)),
            func.sum(Checkpoint.uploaded_bytes).filter(Checkpoint.committed_at.is_not(None)),
            func.sum(Checkpoint.deduplicated_bytes).filter(Checkpoint.committed_at.is_not(None)),
        )
        .join(Checkpoint, Checkpoint.run_id == Run.id)
        .group_by(Run.project_id)
    )
    by_project = {project_id: [int(value or 0) for value in values] for project_id, *values in counted}
    for gone in session.scalars(select(ForgottenTotal)):
        theirs = (gone.committed, gone.aborted, 0, gone.chunk_bytes, gone.uploaded_bytes, gone.deduplicated_bytes)
        here = by_project.get(gone.project_id, [0] * len(theirs))
        by_project[gone.project_id] = [there + still for there, still in zip(theirs, here, strict=True)]
    projects = []
    for project_id, name in sorted(names.items(), key=lambda item: item[1]):
        committed, aborted, uploading, needed, uploaded, deduplicated = by_project.get(project_id, [0] * 6)
        projects.append(
            _ProjectNumbers(
                name=name,
                committed=committed,
                aborted=aborted,
                uploading=uploading,
                needed_bytes=needed,
                uploaded_bytes=uploaded,
                deduplicated_bytes=deduplicated,
                stored_bytes=sizes[project_id],
                held=held[project_id],
            )
        )
    return _Numbers(tuple(projects), _ages(session, database_now(session)))


def _ages(session: Session, now: datetime) -> dict[tuple[str, str], float]:
    """Only of runs that are being trained: how far back they would fall now. The others need no alarm."""
    active = session.execute(
        select(Run.id, Project.name, Run.name)
        .join(Project, Project.id == Run.project_id)
        .join(Attempt, (Attempt.run_id == Run.id) & (Attempt.number == Run.latest_attempt))
        .where(Attempt.ended_at.is_(None))
    ).all()
    ages = {}
    for run_id, project_name, run_name in active:
        point = choose_restore_point(session, run_id, Latest()).restore_point
        if point is not None:
            ages[project_name, run_name] = max(0.0, (now - point.committed_at).total_seconds())
    return ages
