"""Routes of holds: who operates places and extends them, another administrator releases them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import Page
from holdfast_protocol.pruning import ExtendHold, HoldView, PlaceHold, ReleaseHold
from holdfast_protocol.states import Scope
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, MAX_PAGE
from holdfast_service.holds.holds import extend_hold, list_holds, place_hold, release_hold
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["holds"])

Reader = Annotated[Principal, require(Scope.READ)]
Operator = Annotated[Principal, require(Scope.OPERATE)]
Admin = Annotated[Principal, require(Scope.ADMIN)]
Over = Annotated[bool, Query(description="Also holds that are released or have ended.")]
Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Items of a page, at most.")]


@router.post("/v1/checkpoints/{checkpoint_id}/holds", status_code=201, summary="Place a hold on a checkpoint")
def place(checkpoint_id: str, body: PlaceHold, context: Context, caller: Operator) -> HoldView:
    return place_hold(context, caller, checkpoint_id, body)


@router.get("/v1/checkpoints/{checkpoint_id}/holds", summary="List the holds on a checkpoint, the newest first")
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


@router.get("/v1/holds", summary="List holds, the newest first")
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


@router.post("/v1/holds/{hold_id}/release", summary="Release a hold that somebody else has placed")
def release(hold_id: str, body: ReleaseHold, context: Context, caller: Admin) -> HoldView:
    return release_hold(context, caller, hold_id, body)
