"""Takes the samples of an hour, in batches that are transactions of their own.

A project is due while it has no sample of the hour, and two processes that take the same one end up with one row. The
work grows with the projects and the live runs, and not with what they hold: sums come from the tallies. Of a run all
attempts are read, as its goodput needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_protocol.states import CheckpointState
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run
from holdfast_service.db.tables.samples import ProjectSampleRow, RunSampleRow
from holdfast_service.insights.goodput import SeenAttempt, attempt_histories, goodput_of, spent_between
from holdfast_service.lineage.restore_choice import newest_restore_points
from holdfast_service.tallies.sums import sums_of_projects, sums_of_runs
from holdfast_service.usage.cost import cost_of, current_prices
from holdfast_service.usage.show_usage import usage_of_projects

HOUR = timedelta(hours=1)
MOST_RUNS = 1000
"""Of the whole service: those that were opened last."""
AT_ONCE = 100
DETACHED = "detached"
"""The role of a store that the service does not have any more."""


def last_hour(now: datetime) -> datetime:
    """The begin of the last whole hour before `now`. Pure."""
    return now.replace(minute=0, second=0, microsecond=0) - HOUR


def due_projects(hour: datetime) -> Select[str]:
    """The ids of projects that have no sample of the hour, and were there in it."""
    sampled = exists().where(ProjectSampleRow.project_id == Project.id, ProjectSampleRow.hour == hour)
    return select(Project.id).where(Project.purged_at.is_(None), _was_there(Project.created_at, hour), ~sampled)


def _was_there(created_at: InstrumentedAttribute[datetime], hour: datetime) -> ColumnElement[bool]:
    """Made before the end of the hour; or dated after the hour that is under way, by a clock that was ahead."""
    return or_(created_at < hour + HOUR, created_at >= hour + 2 * HOUR)


@dataclass
class _LiveRuns:
    """Of one project. `productive_seconds` and `wall_seconds`: None while no step's time is known, and as the age if
    runs were left out."""

    count: int = 0
    without_restore_point: int = 0
    oldest_restore_point_seconds: float | None = None
    productive_seconds: float | None = None
    wall_seconds: float | None = None

    def add(self, values: dict[str, Any]) -> None:
        age = values["restore_point_age_seconds"]
        self.count += 1
        self.without_restore_point += age is None
        if age is not None:
            self.oldest_restore_point_seconds = max(age, self.oldest_restore_point_seconds or 0.0)

    def add_spent(self, spent: tuple[float, float] | None) -> None:
        if spent is not None:
            self.productive_seconds = (self.productive_seconds or 0.0) + spent[0]
            self.wall_seconds = (self.wall_seconds or 0.0) + spent[1]

    def leave_out(self, live: int, without_restore_point: int) -> None:
        """There are more runs than were looked at: these are all that are live."""
        self.count, self.without_restore_point = live, without_restore_point
        self.oldest_restore_point_seconds = self.productive_seconds = self.wall_seconds = None


def take_samples(context: ServiceContext, hour: datetime) -> int:
    """How many projects were sampled. What is there stays as it is."""
    live: dict[str, _LiveRuns] = {}
    with context.database.read() as session:
        runs = [_Run(*row) for row in session.execute(_runs(hour))]
        counts = session.execute(_counts(hour)).all() if len(runs) == MOST_RUNS else []
    for begin in range(0, len(runs), AT_ONCE):
        if context.stopping.is_set():
            return 0
        with context.database.read() as session:
            rows = list(_sample_runs(session, runs[begin : begin + AT_ONCE], hour, live))
        with context.database.transaction() as session:
            insert_absent(session, RunSampleRow, rows)
    looked_at = Counter(run.project_id for run in runs)
    for project_id, ran, is_live, without in counts:
        if ran > looked_at[project_id]:
            live.setdefault(project_id, _LiveRuns()).leave_out(is_live, without)
    taken = 0
    while not context.stopping.is_set():
        with context.database.read() as session:
            ids = session.scalars(due_projects(hour).order_by(Project.id).limit(AT_ONCE)).all()
            rows = _sample_projects(session, context, ids, hour, live)
        if not rows:
            break
        with context.database.transaction() as session:
            insert_absent(session, ProjectSampleRow, rows)
        taken += len(rows)
    return taken


@dataclass(frozen=True)
class _Run:
    id: str
    project_id: str
    last_step: int | None
    ended_at: datetime | None


def _ran(hour: datetime) -> tuple[ColumnElement[bool], ...]:
    """Of a run and its newest attempt: it had one open in the hour or later, and is of a project that is due. A run
    that was made after the hour is not of it, however late the pass is; nor is one that ended by a clock that was
    ahead: when it did is not known."""
    return (
        Attempt.run_id == Run.id,
        Attempt.number == Run.latest_attempt,
        Run.deleted_at.is_(None),
        _was_there(Run.created_at, hour),
        or_(Attempt.ended_at.is_(None), and_(Attempt.ended_at > hour, Attempt.ended_at < hour + 2 * HOUR)),
        Run.project_id.in_(due_projects(hour)),
    )


def _runs(hour: datetime) -> Select[str, str, int | None, datetime | None]:
    return (
        select(Run.id, Run.project_id, Attempt.last_step, Attempt.ended_at)
        .where(*_ran(hour))
        .order_by(Attempt.opened_at.desc(), Run.id)
        .limit(MOST_RUNS)
    )


def _counts(hour: datetime) -> Select[str, int, int, int]:
    """Of each project the runs, those of them that are live, and of these the ones that have committed nothing: whether
    what others have committed is a restore point is not looked up."""
    live = Attempt.ended_at.is_(None)
    committed = exists().where(Checkpoint.run_id == Run.id, Checkpoint.state == CheckpointState.COMMITTED)
    return (
        select(
            Run.project_id,
            func.count(),
            func.coalesce(func.sum(case((live, 1), else_=0)), 0),
            func.coalesce(func.sum(case((live & ~committed, 1), else_=0)), 0),
        )
        .where(*_ran(hour))
        .group_by(Run.project_id)
    )


def _seen_before(session: Session, run_ids: Collection[str], hour: datetime) -> dict[str, SeenAttempt]:
    """By run, what its open attempt had at its newest sample of the day before. One that was taken late in this hour is
    passed over: the time since then tells too little of it."""
    rows = session.execute(
        select(
            RunSampleRow.run_id, RunSampleRow.attempt, RunSampleRow.taken_at, RunSampleRow.attempt_productive_seconds
        )
        .where(
            RunSampleRow.run_id.in_(run_ids),
            RunSampleRow.hour >= hour - 24 * HOUR,
            RunSampleRow.taken_at <= hour + HOUR / 2,
        )
        .order_by(RunSampleRow.hour)
    )
    return {
        run_id: SeenAttempt(number, at, productive)
        for run_id, number, at, productive in rows
        if number is not None and productive is not None
    }


def _sample_runs(
    session: Session, runs: Sequence[_Run], hour: datetime, live: dict[str, _LiveRuns]
) -> Iterator[dict[str, Any]]:
    """The rows of those that are live, by id. Adds each to what its project has."""
    now = database_now(session)
    histories = attempt_histories(session, [run.id for run in runs])
    seen = _seen_before(session, [run.id for run in runs], hour)
    points = newest_restore_points(session, [run.id for run in runs if run.ended_at is None])
    by_project: dict[str, list[str]] = {}
    for run in runs:
        by_project.setdefault(run.project_id, []).append(run.id)
    sums = {
        run_id: each
        for project_id, ids in by_project.items()
        for run_id, each in sums_of_runs(session, project_id, ids).items()
    }
    for run in sorted(runs, key=lambda each: each.id):
        of_project = live.setdefault(run.project_id, _LiveRuns())
        history = histories.get(run.id, [])
        spent = spent_between(history, hour, hour + HOUR, now, seen.get(run.id))
        of_project.add_spent(spent)
        if run.ended_at is not None or not history:
            continue
        newest = goodput_of(history, now).attempts[-1]
        point = points.get(run.id)
        values = {
            "run_id": run.id,
            "hour": hour,
            "taken_at": now,
            "committed_checkpoints": sums[run.id].committed,
            "logical_bytes": sums[run.id].logical_bytes,
            "productive_seconds": None if spent is None else spent[0],
            "wall_seconds": None if spent is None else spent[1],
            "restore_point_age_seconds": None
            if point is None
            else max(0.0, (now - point.committed_at).total_seconds()),
            "last_step": run.last_step,
            "restore_point_step": None if point is None else point.step,
            "attempt": newest.attempt,
            "attempt_productive_seconds": None if spent is None else newest.productive_seconds,
        }
        of_project.add(values)
        yield values


def _sample_projects(
    session: Session, context: ServiceContext, ids: Sequence[str], hour: datetime, live: dict[str, _LiveRuns]
) -> list[dict[str, Any]]:
    """The rows of projects, in the order of `ids`."""
    projects = {each.id: each for each in session.scalars(select(Project).where(Project.id.in_(ids)))}
    sums = sums_of_projects(session, ids)
    prices = current_prices(session).prices
    rows = []
    for project_id, usage in zip(
        ids, usage_of_projects(session, context, [projects[each] for each in ids], orphans=False), strict=True
    ):
        stores: dict[str, int] = {}
        for each in usage.stores:
            role = DETACHED if each.store is None else each.store.value
            stores[role] = stores.get(role, 0) + each.stored_bytes
        cost = cost_of(prices, usage)
        runs = live.get(project_id, _LiveRuns())
        rows.append(
            {
                "project_id": project_id,
                "hour": hour,
                "taken_at": usage.at,
                "committed_checkpoints": sums[project_id].committed,
                "logical_bytes": usage.logical_bytes,
                "productive_seconds": runs.productive_seconds,
                "wall_seconds": runs.wall_seconds,
                "restore_point_age_seconds": runs.oldest_restore_point_seconds,
                "stored_bytes": usage.stored_bytes,
                "stores": stores,
                "currency": cost.currency,
                "per_month": cost.per_month,
                "unpriced_bytes": cost.unpriced_bytes,
                "live_runs": runs.count,
                "runs_without_restore_point": runs.without_restore_point,
            }
        )
    return rows
