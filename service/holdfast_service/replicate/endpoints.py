"""Routes of the copies in a second store: how far behind it is, and drills."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import Page
from holdfast_protocol.copies import RunCopies, StartDrill
from holdfast_protocol.service import OperationView
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.replicate.drill import start_drill
from holdfast_service.replicate.lag import copies_of_project, copies_of_run
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, IdempotencyKey, Limit, Operator, Reader

router = APIRouter(route_class=GuardedRoute, tags=["copies"])

Late = Annotated[bool, Query(description="Only runs whose `rpo_seconds` is above their `rpo_objective_seconds`.")]


@router.get("/v1/projects/{project}/copies", name="list", summary="How far the second store is behind, run by run")
def of_project(
    *,
    project: str,
    context: Context,
    caller: Reader,
    late: Late = False,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[RunCopies]:
    return copies_of_project(context, caller, project, late=late, cursor=cursor, limit=limit)


@router.get(
    "/v1/projects/{project}/runs/{run}/copies", name="of_run", summary="How far the second store is behind with a run"
)
def of_run(project: str, run: str, context: Context, caller: Reader) -> RunCopies:
    return copies_of_run(context, caller, project, run)


@router.post(
    "/v1/projects/{project}/runs/{run}/drills",
    status_code=202,
    name="start_drill",
    summary="Restore a checkpoint from one store alone, and verify it",
)
def drill(
    project: str,
    run: str,
    body: StartDrill,
    *,
    context: Context,
    caller: Operator,
    idempotency_key: IdempotencyKey = None,
) -> OperationView:
    return start_drill(context, caller, project, run, body, key=idempotency_key)
