"""Routes of operations. What starts one belongs to its verb."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import Page
from holdfast_protocol.operations import OperationView
from holdfast_protocol.states import OperationState, Scope
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.catalog.cursors import DEFAULT_PAGE, MAX_PAGE
from holdfast_service.context import Context
from holdfast_service.operations.cancel import cancel_operation
from holdfast_service.operations.list_operations import list_operations, show_operation
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["operations"])


@router.get("/v1/operations", summary="List long operations, the newest first")
def list_all(  # noqa: PLR0917 (FastAPI calls it by keyword)
    context: Context,
    caller: Annotated[Principal, require(Scope.READ)],
    project: str | None = None,
    run: str | None = None,
    kind: str | None = None,
    state: OperationState | None = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
) -> Page[OperationView]:
    return list_operations(
        context, caller, project=project, run=run, kind=kind, state=state, cursor=cursor, limit=limit
    )


@router.get("/v1/operations/{operation_id}", summary="Show a long operation: how far it is, and what came of it")
def show(operation_id: str, context: Context, caller: Annotated[Principal, require(Scope.READ)]) -> OperationView:
    return show_operation(context, caller, operation_id)


@router.post("/v1/operations/{operation_id}/cancel", summary="Cancel a long operation")
def cancel(operation_id: str, context: Context, caller: Annotated[Principal, require(Scope.OPERATE)]) -> OperationView:
    return cancel_operation(context, caller, operation_id)
