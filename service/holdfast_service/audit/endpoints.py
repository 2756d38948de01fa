"""The route of audit events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from holdfast_protocol.base import Page
from holdfast_protocol.service import ActorKind, EventView
from holdfast_protocol.states import Scope
from holdfast_service.audit.list_events import EventFilter, list_events
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, MAX_PAGE
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["events"])


@router.get("/v1/events", summary="List who changed what and why, the newest first")
def list_all(
    *,
    context: Context,
    caller: Annotated[Principal, require(Scope.READ)],
    project: Annotated[str | None, Query(description="Only of this project.")] = None,
    run: Annotated[str | None, Query(description="Only of this run of the project.")] = None,
    checkpoint: Annotated[str | None, Query(description="Only of this checkpoint, by its id.")] = None,
    actor: Annotated[str | None, Query(description="Only by this token's name or controller.")] = None,
    actor_kind: Annotated[ActorKind | None, Query(description="Only by persons, or only by controllers.")] = None,
    action: Annotated[str | None, Query(max_length=100, description="What the action begins with: `hold.`.")] = None,
    since: Annotated[AwareDatetime | None, Query(description="From this moment on.")] = None,
    until: Annotated[AwareDatetime | None, Query(description="Before this moment.")] = None,
    cursor: Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Items of a page, at most.")] = DEFAULT_PAGE,
) -> Page[EventView]:
    wanted = EventFilter(
        project=project,
        run=run,
        checkpoint_id=checkpoint,
        actor=actor,
        actor_kind=actor_kind,
        action=action,
        since=since,
        until=until,
    )
    return list_events(context, caller, wanted, cursor=cursor, limit=limit)
