"""Routes of the stores, and of the catalog's comparison with them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.base import Page
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import Scope, StoreRole
from holdfast_protocol.stores import CheckCatalog, ClaimStore, StoreView
from holdfast_service.attached_stores.claim import claim, list_stores
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog_check.check import start_check
from holdfast_service.context import Context
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["stores"])


@router.get("/v1/stores", summary="List the attached stores, and whether each is this catalog's")
def stores(context: Context, caller: Annotated[Principal, require(Scope.READ)]) -> Page[StoreView]:
    return Page(items=list_stores(context, caller))


@router.post("/v1/catalog/check", status_code=202, summary="Compare the catalog with its stores, both ways")
def check(body: CheckCatalog, context: Context, caller: Annotated[Principal, require(Scope.OPERATE)]) -> OperationView:
    return start_check(context, caller, body)


@router.post("/v1/stores/{role}/claim", summary="Take a store for this catalog's in this epoch, after a check")
def claim_store(
    role: StoreRole, body: ClaimStore, context: Context, caller: Annotated[Principal, require(Scope.ADMIN)]
) -> StoreView:
    return claim(context, caller, role, body)
