"""Routes of the stores, and of the catalog's comparison with them."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.base import Page
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import StoreRole
from holdfast_protocol.stores import CheckCatalog, ClaimStore, StoreView
from holdfast_service.attached_stores.epoch import claim, list_stores
from holdfast_service.catalog_check.check import start_check
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, page_of
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import (
    Cursor,
    IdempotencyKey,
    Limit,
    PlatformAdmin,
    PlatformOperator,
    PlatformReader,
)

router = APIRouter(route_class=GuardedRoute, tags=["stores"])
catalog_router = APIRouter(route_class=GuardedRoute, tags=["catalog"])


@router.get("/v1/stores", name="list", summary="List the attached stores, and whether each is this catalog's")
def stores(
    context: Context, caller: PlatformReader, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[StoreView]:
    del caller
    return page_of("stores", list_stores(context), lambda each: each.role, cursor=cursor, limit=limit)


@catalog_router.post(
    "/v1/catalog/checks", status_code=202, name="start_check", summary="Compare the catalog with its stores, both ways"
)
def check(
    body: CheckCatalog, context: Context, caller: PlatformOperator, idempotency_key: IdempotencyKey = None
) -> OperationView:
    return start_check(context, caller, body, idempotency_key)


@router.post(
    "/v1/stores/{role}/claim", name="claim", summary="Take a store for this catalog's in this epoch, after a check"
)
def claim_store(role: StoreRole, body: ClaimStore, context: Context, caller: PlatformAdmin) -> StoreView:
    return claim(context, caller, role, body)
