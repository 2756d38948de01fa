"""The route of audit events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import StringConstraints

from holdfast_protocol.base import Page
from holdfast_protocol.service import ActorKind, AuditEventView
from holdfast_service.audit.list import AuditFilter, list_audit_events
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, Limit, Moment, Reader

router = APIRouter(route_class=GuardedRoute, tags=["audit"])
_ActionPrefix = Annotated[str, StringConstraints(max_length=100)]


@router.get("/v1/audit-events", name="list", summary="List who changed what and why, the newest first")
def list_all(
    *,
    context: Context,
    caller: Reader,
    project: Annotated[str | None, Query(description="Only of this project.")] = None,
    run: Annotated[str | None, Query(description="Only of this run of the project.")] = None,
    checkpoint: Annotated[str | None, Query(description="Only of this checkpoint, by its id.")] = None,
    actor: Annotated[str | None, Query(description="Only by this token's name or controller.")] = None,
    actor_kind: Annotated[ActorKind | None, Query(description="Only by persons, or only by controllers.")] = None,
    action: Annotated[
        list[_ActionPrefix] | None,
        Query(max_length=20, description="What the action begins with: `hold.`. One or several."),
    ] = None,
    since: Annotated[Moment | None, Query(description="From this moment on.")] = None,
    until: Annotated[Moment | None, Query(description="Before this moment.")] = None,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[AuditEventView]:
    wanted = AuditFilter(
        project=project,
        run=run,
        checkpoint_id=checkpoint,
        actor=actor,
        actor_kind=actor_kind,
        actions=action or (),
        since=since,
        until=until,
    )
    return list_audit_events(context, caller, wanted, cursor=cursor, limit=limit)
