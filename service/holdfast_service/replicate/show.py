"""How far the second store is behind, for people."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.copies import RunCopies
from holdfast_protocol.policies import PolicyKind
from holdfast_protocol.states import StoreRole
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.cursors import cut_page, decode_cursor
from holdfast_service.catalog.policies import effective_policy
from holdfast_service.catalog.resolve import project_named, run_named
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.replicate.lag import RunLag, lag_of

_CURSOR = "copies"


def copies_of_run(context: ServiceContext, caller: Principal, project: str, run: str) -> RunCopies:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    with context.database.read() as session:
        owner, found = run_named(session, caller, project, run)
        return _views(session, context, owner, [found])[0]


def copies_of_project(
    context: ServiceContext, caller: Principal, project: str, *, cursor: str | None, limit: int
) -> Page[RunCopies]:
    """Every run of it, by name. Raises `forbidden`, `project_not_found` and `invalid_request`."""
    query = select(Run).order_by(Run.name).limit(limit + 1)
    if cursor is not None:
        (after,) = decode_cursor(_CURSOR, cursor, str)
        query = query.where(Run.name > after)
    with context.database.read() as session:
        owner = project_named(session, caller, project)
        found = session.scalars(query.where(Run.project_id == owner.id, Run.deleted_at.is_(None))).all()
        rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (row.name,))
        return Page(items=_views(session, context, owner, rows), next_cursor=next_cursor)


def _views(session: Session, context: ServiceContext, project: Project, runs: Sequence[Run]) -> list[RunCopies]:
    second = context.attached(StoreRole.SECOND)
    lags = {} if second is None else lag_of(session, second.store_id, [run.id for run in runs])
    now = database_now(session)
    views = []
    for run in runs:
        lag = lags.get(run.id, RunLag())
        views.append(
            RunCopies(
                project=project.name,
                run=run.name,
                store=None if second is None else StoreRole.SECOND,
                policy=effective_policy(session, PolicyKind.COPIES, project.id, run.id) is not None,
                newest_step=lag.newest_step,
                newest_committed_at=lag.newest_committed_at,
                copied_step=lag.copied_step,
                copied_committed_at=lag.copied_committed_at,
                lag_seconds=lag.seconds(now),
                lag_steps=lag.steps,
                lag_bytes=lag.missing_bytes,
                waiting=lag.waiting,
                copied=lag.copied,
                error=lag.error,
            )
        )
    return views
