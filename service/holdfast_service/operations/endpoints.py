"""Routes of operations. What starts one belongs to its verb."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.base import Page
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import OperationState
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.operations.list_operations import cancel_operation, list_operations, show_operation
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, Limit, Operator, Reader

router = APIRouter(route_class=GuardedRoute, tags=["operations"])


@router.get("/v1/operations", summary="List long operations, the newest first", name="list")
def list_long_operations(  # noqa: PLR0917 (FastAPI calls it by keyword)
    context: Context,
    caller: Reader,
    project: str | None = None,
    run: str | None = None,
    checkpoint_id: str | None = None,
    kind: str | None = None,
    state: OperationState | None = None,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[OperationView]:
    return list_operations(
        context,
        caller,
        project=project,
        run=run,
        checkpoint_id=checkpoint_id,
        kind=kind,
        state=state,
        cursor=cursor,
        limit=limit,
    )


@router.get(
    "/v1/operations/{operation_id}", summary="Show a long operation: how far it is, and what came of it", name="show"
)
def show_long_operation(operation_id: str, context: Context, caller: Reader) -> OperationView:
    return show_operation(context, caller, operation_id)


@router.post("/v1/operations/{operation_id}/cancel", summary="Cancel a long operation")
def cancel(operation_id: str, context: Context, caller: Operator) -> OperationView:
    return cancel_operation(context, caller, operation_id)
