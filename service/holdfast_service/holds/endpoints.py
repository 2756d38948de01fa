"""Routes of holds: who operates places and extends them, another administrator releases them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import Page
from holdfast_protocol.pruning import ExtendHold, HoldView, PlaceHold, ReleaseHold
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.holds.holds import extend_hold, list_holds, place_hold, release_hold
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Admin, Cursor, IdempotencyKey, Limit, Operator, Reader

router = APIRouter(route_class=GuardedRoute, tags=["holds"])

Over = Annotated[bool, Query(description="Also holds that are released or have ended.")]


@router.post(
    "/v1/checkpoints/{checkpoint_id}/holds", status_code=201, name="create", summary="Place a hold on a checkpoint"
)
def place(
    checkpoint_id: str, body: PlaceHold, context: Context, caller: Operator, idempotency_key: IdempotencyKey = None
) -> HoldView:
    return place_hold(context, caller, checkpoint_id, body, idempotency_key)


@router.get(
    "/v1/checkpoints/{checkpoint_id}/holds",
    name="list_of_checkpoint",
    summary="List the holds on a checkpoint, the newest first",
)
def of_checkpoint(
    *,
    checkpoint_id: str,
    context: Context,
    caller: Reader,
    over: Over = False,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[HoldView]:
    return list_holds(context, caller, checkpoint_id=checkpoint_id, over=over, cursor=cursor, limit=limit)


@router.get("/v1/holds", name="list", summary="List holds, the newest first")
def list_all(
    *,
    context: Context,
    caller: Reader,
    project: Annotated[str | None, Query(description="Only of this project.")] = None,
    run: Annotated[str | None, Query(description="Only of this run of the project.")] = None,
    over: Over = False,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[HoldView]:
    return list_holds(context, caller, project=project, run=run, over=over, cursor=cursor, limit=limit)


@router.patch("/v1/holds/{hold_id}", summary="Move the end of a hold further away")
def extend(hold_id: str, body: ExtendHold, context: Context, caller: Operator) -> HoldView:
    return extend_hold(context, caller, hold_id, body)


@router.post("/v1/holds/{hold_id}/release", summary="Release a hold that another person has placed")
def release(hold_id: str, body: ReleaseHold, context: Context, caller: Admin) -> HoldView:
    return release_hold(context, caller, hold_id, body)
