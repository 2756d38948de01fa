"""The controller `samples`: after the end of each hour it takes the samples of that hour, and forgets old ones.

An hour in which no process ran has no sample, and gets none later: what was then is not known any more.

In the hour after a day without samples nothing is forgotten: the clock may have jumped. In the next hour it is (rule
database-clock).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import delete, exists, func, literal, select, tuple_
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.samples import ProjectSampleRow, RunSampleRow
from holdfast_service.samples.take import HOUR, due_projects, last_hour, take_samples
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport, counted

NAME = "samples"
_FORGOTTEN_AT_ONCE = 500
_LONGEST_STANDSTILL_HOURS = 24


@dataclass(frozen=True, kw_only=True)
class SamplesReport(ReconcileReport):
    """`done`: projects that were sampled. `missed_hours`: before the hour, since the last one that has samples."""

    forgotten: int = 0
    missed_hours: int = 0


def reconcile(context: ServiceContext) -> SamplesReport:
    with context.database.read() as session:
        now = database_now(session)
        hour = last_hour(now)
        due = session.scalar(select(exists(due_projects(hour))))
        before = session.scalar(select(func.max(ProjectSampleRow.hour)).where(ProjectSampleRow.hour < hour))
    done = take_samples(context, hour) if due else 0
    missed = 0 if before is None else (hour - before) // HOUR - 1
    oldest = now - timedelta(days=context.settings.keep_samples_days)
    tables = ((RunSampleRow, RunSampleRow.run_id), (ProjectSampleRow, ProjectSampleRow.project_id))
    forgotten = (
        0 if missed > _LONGEST_STANDSTILL_HOURS else sum(_forget(context, table, key, oldest) for table, key in tables)
    )
    return SamplesReport(done=done, forgotten=forgotten, missed_hours=missed if done else 0)


def _forget(
    context: ServiceContext, table: type[ProjectSampleRow] | type[RunSampleRow], key: Any, oldest: datetime
) -> int:
    """How many rows went, the oldest first."""
    with context.database.read() as session:
        if session.scalar(select(literal(1)).where(table.hour < oldest).limit(1)) is None:
            return 0
    forgotten = 0
    while not context.stopping.is_set():
        count = context.database.run(partial(_forget_some, table=table, key=key, oldest=oldest))
        forgotten += count
        if count < _FORGOTTEN_AT_ONCE:
            break
    return forgotten


def _forget_some(
    session: Session, table: type[ProjectSampleRow] | type[RunSampleRow], key: Any, oldest: datetime
) -> int:
    old = select(key, table.hour).where(table.hour < oldest).order_by(table.hour, key).limit(_FORGOTTEN_AT_ONCE)
    rows = [(each, hour) for each, hour in session.execute(old)]
    if rows:
        gone = delete(table).where(tuple_(key, table.hour).in_(rows))
        session.execute(gone, execution_options={"synchronize_session": False})
    return len(rows)


def backlog(session: Session, _context: ServiceContext) -> Backlog:
    """Projects that have no sample of the last hour yet."""
    hour = last_hour(database_now(session))
    due = counted(session, due_projects(hour))
    return Backlog(due=due, oldest_due_at=hour + HOUR if due else None)


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop(NAME, settings.controller_interval_seconds, reconcile, backlog, sole=True),)
