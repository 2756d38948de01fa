"""Routes of what a rebuild could not know."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.base import Page
from holdfast_protocol.states import Scope
from holdfast_protocol.stores import ConfirmCommits, DoubtView
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.context import Context
from holdfast_service.rebuild.doubts import confirm, list_doubts
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["stores"])


@router.get("/v1/catalog/doubts", summary="List what a rebuild of the catalog could not know")
def doubts(context: Context, caller: Annotated[Principal, require(Scope.READ)]) -> Page[DoubtView]:
    return Page(items=list_doubts(context, caller))


@router.post("/v1/catalog/confirm", summary="Confirm that a rebuilt catalog lacks no commit of a run, or of a project")
def confirm_commits(
    body: ConfirmCommits, context: Context, caller: Annotated[Principal, require(Scope.ADMIN)]
) -> DoubtView:
    return confirm(context, caller, body)
