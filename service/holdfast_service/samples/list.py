"""Samples of a time, the newest first, by hour or by day; and the hours that are missing between them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.usage import ProjectSample, RunSample, SampledEvery
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.pages import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.db.tables.samples import ProjectSampleRow, RunSampleRow
from holdfast_service.runs.views import project_named, run_named
from holdfast_service.samples.take import HOUR

_HOURS_OF_A_DAY = 24
_RowT = TypeVar("_RowT", ProjectSampleRow, RunSampleRow)


@dataclass(frozen=True)
class Span:
    """`since`: hours that begin then or later; `until`: that begin earlier. `limit`: items of a page."""

    every: SampledEvery
    since: datetime | None
    until: datetime | None
    cursor: str | None
    limit: int


def list_project_samples(context: ServiceContext, caller: Principal, project: str, span: Span) -> Page[ProjectSample]:
    """Also of a project in the trash. Raises `forbidden`, `project_not_found` and `invalid_request`."""
    with context.database.read() as session:
        owner = project_named(session, caller, project, deleted=True)
        mine = ProjectSampleRow.project_id == owner.id
        groups, next_cursor = _groups(session, ProjectSampleRow, mine, span)
        missed = _missed_hours(session, ProjectSampleRow, mine, owner.id, groups)
        items = [_project_sample(group, span.every, missed) for group in groups]
    return Page(items=items, next_cursor=next_cursor)


def list_run_samples(context: ServiceContext, caller: Principal, project: str, run: str, span: Span) -> Page[RunSample]:
    """Also of a run in the trash. Raises `forbidden`, `project_not_found`, `run_not_found` and `invalid_request`."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run, deleted=True)
        mine = RunSampleRow.run_id == found.id
        groups, next_cursor = _groups(session, RunSampleRow, mine, span)
        missed = _missed_hours(session, RunSampleRow, mine, owner.id, groups)
        items = [_run_sample(group, span.every, missed) for group in groups]
    return Page(items=items, next_cursor=next_cursor)


def _groups(
    session: Session, table: type[_RowT], mine: ColumnElement[bool], span: Span
) -> tuple[Sequence[list[_RowT]], str | None]:
    """The rows of each item of a page, all the newest first. Of so many rows of one subject there are at least `limit`
    whole days, and a row of the next one if there is one."""
    kind = f"{table.__tablename__} {span.every.value}"
    # What is dated later than now was taken by a clock that was ahead.
    query = select(table).where(mine, table.hour <= database_now(session)).order_by(table.hour.desc())
    if span.since is not None:
        query = query.where(table.hour >= span.since)
    if span.until is not None:
        query = query.where(table.hour < span.until)
    if span.cursor is not None:
        (before,) = decode_cursor(kind, span.cursor, str)
        query = query.where(table.hour < moment_from_text(before))
    hours = _HOURS_OF_A_DAY if span.every is SampledEvery.DAY else 1
    rows = session.scalars(query.limit(span.limit * hours + 1)).all()
    groups = [list(group) for _, group in groupby(rows, key=lambda row: _begin(row, span.every))]
    return cut_page(kind, groups, span.limit, lambda group: (moment_to_text(_begin(group[0], span.every)),))


def _begin(row: ProjectSampleRow | RunSampleRow, every: SampledEvery) -> datetime:
    return row.hour.replace(hour=0) if every is SampledEvery.DAY else row.hour


def _missed_hours(
    session: Session, table: type[_RowT], mine: ColumnElement[bool], project_id: str, groups: Sequence[list[_RowT]]
) -> dict[datetime, int]:
    """By hour of a sample, how many hours before it have none: those since the sample before in which not even the
    project was sampled. A run that is not live has no samples, and misses none."""
    rows: list[_RowT] = [row for group in groups for row in group]
    if not rows:
        return {}
    before = session.scalar(select(func.max(table.hour)).where(mine, table.hour < rows[-1].hour))
    befores = [*(row.hour for row in rows[1:]), before]
    gaps: dict[datetime, datetime] = {
        row.hour: earlier
        for row, earlier in zip(rows, befores, strict=True)
        if earlier is not None and row.hour - earlier > HOUR
    }
    if not gaps:
        return {}
    query = select(ProjectSampleRow.hour).where(
        ProjectSampleRow.project_id == project_id,
        ProjectSampleRow.hour > min(gaps.values()),
        ProjectSampleRow.hour < max(gaps),
    )
    sampled = session.scalars(query.order_by(ProjectSampleRow.hour)).all()
    return {
        hour: (hour - earlier) // HOUR - 1 - (bisect_left(sampled, hour) - bisect_right(sampled, earlier))
        for hour, earlier in gaps.items()
    }


def _common(
    group: Sequence[ProjectSampleRow] | Sequence[RunSampleRow], every: SampledEvery, missed: dict[datetime, int]
) -> dict[str, Any]:
    last = group[0]
    productive = sum(row.productive_seconds or 0.0 for row in group)
    wall = sum(row.wall_seconds or 0.0 for row in group)
    ages = [row.restore_point_age_seconds for row in group if row.restore_point_age_seconds is not None]
    return {
        "since": _begin(last, every),
        "taken_at": last.taken_at,
        "hours": len(group),
        "missed_hours": sum(missed.get(row.hour, 0) for row in group),
        "committed_checkpoints": last.committed_checkpoints,
        "logical_bytes": last.logical_bytes,
        "goodput": productive / wall if wall else None,
        "productive_seconds": productive,
        "wall_seconds": wall,
        "restore_point_age_seconds": max(ages, default=None),
    }


def _project_sample(
    group: Sequence[ProjectSampleRow], every: SampledEvery, missed: dict[datetime, int]
) -> ProjectSample:
    last = group[0]
    return ProjectSample(
        **_common(group, every, missed),
        stored_bytes=last.stored_bytes,
        stores=last.stores,
        per_month=last.per_month,
        currency=last.currency,
        unpriced_bytes=last.unpriced_bytes,
        live_runs=last.live_runs,
        runs_without_restore_point=last.runs_without_restore_point,
    )


def _run_sample(group: Sequence[RunSampleRow], every: SampledEvery, missed: dict[datetime, int]) -> RunSample:
    last = group[0]
    return RunSample(
        **_common(group, every, missed), last_step=last.last_step, restore_point_step=last.restore_point_step
    )
