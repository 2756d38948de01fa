"""The events that the caller may know of, the newest first. A project's token sees its project's and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, Select, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_protocol.base import Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import ActorKind, AuditEventView
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Checkpoint, Project, Run
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import checkpoint_by_id, project_named, run_named

_CURSOR = "audit-events"


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """None: whatever. `actions` are prefixes, of which one must fit, `since` is inclusive and `until` is not."""

    project: str | None = None
    run: str | None = None
    checkpoint_id: str | None = None
    actor: str | None = None
    actor_kind: ActorKind | None = None
    actions: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None


def list_audit_events(
    context: ServiceContext, caller: Principal, wanted: AuditFilter, *, cursor: str | None, limit: int
) -> Page[AuditEventView]:
    """Raises what the names raise."""
    with context.database.read() as session:
        query = _query(session, caller, wanted)
        if cursor is not None:
            (before,) = decode_cursor(_CURSOR, cursor, int)
            query = query.where(AuditEvent.id < before)
        events = session.scalars(query.order_by(AuditEvent.id.desc()).limit(limit + 1)).all()
        shown, next_cursor = cut_page(_CURSOR, events, limit, lambda event: (event.id,))
        return Page(items=_views(session, shown), next_cursor=next_cursor)


def _query(session: Session, caller: Principal, wanted: AuditFilter) -> Select[AuditEvent]:
    query = select(AuditEvent)
    if caller.project_id is not None:
        query = query.where(AuditEvent.project_id == caller.project_id)
    if wanted.project is not None:
        project_ids = _projects(session, caller, wanted.project)
        query = query.where(AuditEvent.project_id.in_(project_ids))
        if wanted.run is not None:
            query = query.where(AuditEvent.run_id.in_(_runs(session, caller, project_ids, wanted.project, wanted.run)))
    elif wanted.run is not None:
        raise ProblemError(ProblemCode.INVALID_REQUEST, "A run is named with its project. Give `project` as well.")
    if wanted.checkpoint_id is not None:
        query = query.where(AuditEvent.checkpoint_id == wanted.checkpoint_id)
        if session.scalar(query.limit(1)) is None:  # the row of a subject with events may be gone
            checkpoint_by_id(session, caller, wanted.checkpoint_id)
    if wanted.actor is not None:
        query = query.where(AuditEvent.actor == wanted.actor)
    if wanted.actor_kind is not None:
        query = query.where(AuditEvent.actor_kind == wanted.actor_kind)
    if wanted.actions:
        query = query.where(or_(*(AuditEvent.action.startswith(each, autoescape=True) for each in wanted.actions)))
    if wanted.since is not None:
        query = query.where(AuditEvent.at >= wanted.since)
    if wanted.until is not None:
        query = query.where(AuditEvent.at < wanted.until)
    return query


def _projects(session: Session, caller: Principal, name: str) -> Sequence[str]:
    """The ids of all that were ever called so. Raises what finding one raises, if none was."""
    caller.check_project_name(name)
    found = session.scalars(select(Project.id).where(_was_called(Project.name, name))).all()
    return found or [project_named(session, caller, name, deleted=True).id]


def _runs(session: Session, caller: Principal, project_ids: Sequence[str], project: str, name: str) -> Sequence[str]:
    """Likewise, in these projects."""
    query = select(Run.id).where(Run.project_id.in_(project_ids), _was_called(Run.name, name))
    return session.scalars(query).all() or [run_named(session, caller, project, name, deleted=True)[1].id]


def _was_called(column: InstrumentedAttribute[str], name: str) -> ColumnElement[bool]:
    """A purged one has its id behind its name, which may be another's by now; the id names it alone."""
    return or_(column == name, column.startswith(f"{name}~", autoescape=True))


def _views(session: Session, events: Sequence[AuditEvent]) -> list[AuditEventView]:
    """With today's names; what an event speaks of may be gone, and it is told all the same."""
    projects = _by_id(session, select(Project.id, Project.name), Project.id, {event.project_id for event in events})
    runs = _by_id(session, select(Run.id, Run.name), Run.id, {event.run_id for event in events})
    steps = _by_id(
        session, select(Checkpoint.id, Checkpoint.step), Checkpoint.id, {event.checkpoint_id for event in events}
    )
    return [
        AuditEventView(
            id=event.id,
            at=event.at,
            actor_kind=cast("ActorKind", event.actor_kind),
            actor=event.actor,
            token_id=event.token_id,
            action=event.action,
            project=projects.get(event.project_id),
            run=runs.get(event.run_id),
            checkpoint_id=event.checkpoint_id,
            step=steps.get(event.checkpoint_id),
            reason=event.reason,
            before=event.before,
            after=event.after,
        )
        for event in events
    ]


def _by_id(session: Session, query: Select[str, Any], column: Any, ids: set[str | None]) -> dict[str | None, Any]:
    return dict(session.execute(query.where(column.in_(ids - {None}))).all())
