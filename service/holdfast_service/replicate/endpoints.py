"""Routes of the copies in a second store: how far behind it is, and drills."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import Page
from holdfast_protocol.copies import RunCopies, StartDrill
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import Scope
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, MAX_PAGE
from holdfast_service.replicate.drill import start_drill
from holdfast_service.replicate.lag import copies_of_project, copies_of_run
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["copies"])

Reader = Annotated[Principal, require(Scope.READ)]
Operator = Annotated[Principal, require(Scope.OPERATE)]


@router.get("/v1/projects/{project}/copies", summary="How far the second store is behind, run by run")
def of_project(
    project: str,
    context: Context,
    caller: Reader,
    cursor: Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Items of a page, at most.")] = DEFAULT_PAGE,
) -> Page[RunCopies]:
    return copies_of_project(context, caller, project, cursor=cursor, limit=limit)


@router.get("/v1/projects/{project}/runs/{run}/copies", summary="How far the second store is behind with a run")
def of_run(project: str, run: str, context: Context, caller: Reader) -> RunCopies:
    return copies_of_run(context, caller, project, run)


@router.post(
    "/v1/projects/{project}/runs/{run}/drills", summary="Restore a checkpoint from one store alone, and verify it"
)
def drill(project: str, run: str, body: StartDrill, context: Context, caller: Operator) -> OperationView:
    return start_drill(context, caller, project, run, body)
