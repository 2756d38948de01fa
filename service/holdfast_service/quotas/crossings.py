"""Tells once that a quota is near, that it is reached, and that it is relieved. What was told stands in the project's
row, with the quota that it was told of.

A hard quota is reached when all of it is used, and also when it has refused a call: what is left may be less than any
save needs. It is relieved well below where it was near, so that one checkpoint more or less does not tell it again, and
after a refusal not before less is used than then. Where nothing was used then, it is relieved when a call has fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.events import EventType
from holdfast_protocol.states import QuotaKind
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import announce
from holdfast_service.quotas.limits import HARD, SOFT, OverQuotaError, used_of

NEAR_SHARE = 0.8
RELIEVED_SHARE = 0.75


class Level(IntEnum):
    CALM = 0
    NEAR = 1
    REACHED = 2


@dataclass(frozen=True)
class _Quota:
    column: str
    kind: QuotaKind
    name: str


_QUOTAS = (
    *(_Quota(column, kind, kind.value) for kind, column in HARD.items()),
    *(_Quota(column, kind, f"soft {kind}") for kind, column in SOFT.items()),
)


def level_of(used: int, quota: int, before: Level, refused_at: int | None = None) -> Level:
    """`before`: what was told of this very quota. `refused_at`: what was used when it refused a call."""
    if used >= quota:
        return Level.REACHED
    if used >= NEAR_SHARE * quota:
        return max(before, Level.NEAR)
    relieved_below = RELIEVED_SHARE * quota
    if refused_at is not None and not refused_at == 0 < used:
        relieved_below = min(relieved_below, refused_at)
    return before if used >= relieved_below else Level.CALM


def tell_crossings(context: ServiceContext) -> int:
    """Of all projects; how many quotas were told of. One statement where no project has a quota."""
    with context.database.read() as session:
        has_one = or_(*(getattr(Project, each.column).is_not(None) for each in _QUOTAS))
        limited = session.scalars(select(Project).where(has_one, Project.deleted_at.is_(None))).all()
        used = used_of(session, context, [project.id for project in limited]) if limited else {}
        differ = [project.id for project in limited if any(_changes(project, used[project.id], None))]
    told = 0
    for project_id in differ:
        with context.database.transaction() as session:
            told += tell(session, context, project_id)
    return told


def tell(session: Session, context: ServiceContext, project_id: str, *, refused: str | None = None) -> int:
    """What has changed of this project's quotas. `refused`: the column of one that has refused a call."""
    project = session.execute(
        select(Project)
        .where(Project.id == project_id)
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).scalar_one()
    used = used_of(session, context, [project_id])[project_id]
    now = database_now(session)
    levels = dict(project.quota_levels)
    told = 0
    for quota, before, level in _changes(project, used, refused):
        for event in _events(before, level):
            reason = _reason(project, quota, used[quota.kind], refused=quota.column == refused)
            announce(session, event, None, now, project_id=project_id, quota=quota.name, reason=reason)
            told += 1
        levels.pop(quota.column, None)
        if level is not Level.CALM:
            refused_at = [used[quota.kind]] if quota.column == refused else []
            levels[quota.column] = [level.value, getattr(project, quota.column), *refused_at]
    project.quota_levels = levels
    return told


def _changes(
    project: Project, used: Mapping[QuotaKind, int], refused: str | None
) -> Iterator[tuple[_Quota, Level, Level]]:
    """What was told, and what is to be told. Of another quota than the one that was told of, it is told anew."""
    for quota in _QUOTAS:
        limit: int | None = getattr(project, quota.column)
        before, of, refused_at = _told_last(project, quota)
        if limit is not None and refused_at is not None and refused_at < NEAR_SHARE * limit <= used[quota.kind]:
            before = Level.CALM  # one large call was refused long before; that little is left for any call is news
        if limit is None:
            level = Level.CALM
        elif quota.column == refused:
            level = Level.REACHED
        else:
            level = level_of(used[quota.kind], limit, before if of == limit else Level.CALM, refused_at)
        if level is not before or (level is not Level.CALM and of != limit):
            yield quota, before, level


def _told_last(project: Project, quota: _Quota) -> tuple[Level, int | None, int | None]:
    """The level, of which quota, and what was used when it refused a call."""
    said = project.quota_levels.get(quota.column)
    if said is None:
        return Level.CALM, None, None
    return Level(said[0]), said[1], said[2] if len(said) > 2 else None


def _events(before: Level, level: Level) -> Iterator[EventType]:
    if level < before:
        yield EventType.QUOTA_RELIEVED
    if level != before and level is not Level.CALM:
        yield EventType.QUOTA_REACHED if level is Level.REACHED else EventType.QUOTA_NEAR


def _reason(project: Project, quota: _Quota, used: int, *, refused: bool) -> str:
    limit = getattr(project, quota.column)
    if limit is None:
        return "there is no such quota any more"
    text = f"{used:,} of {limit:,} {quota.kind}"
    if quota.column in SOFT.values():
        return f"{text}, the soft quota: nothing is refused"
    return f"{text}; a call was refused that needs more than is left" if refused else text


@contextmanager
def telling_refusals(context: ServiceContext) -> Iterator[None]:
    """Around a transaction that a quota may refuse: the event needs one of its own, because that one is rolled back."""
    try:
        yield
    except OverQuotaError as error:
        with suppress(ProblemError):  # the caller is to hear of the quota, and not of this
            _tell_refusal(context, error)
        raise


def _tell_refusal(context: ServiceContext, error: OverQuotaError) -> None:
    column = HARD[error.kind]
    with context.database.read() as session:
        levels = session.scalar(select(Project.quota_levels).where(Project.id == error.project_id))
    if levels is None or levels.get(column, (Level.CALM,))[0] == Level.REACHED:
        return  # as for all ranks but the first
    with context.database.transaction() as session:
        tell(session, context, error.project_id, refused=column)
