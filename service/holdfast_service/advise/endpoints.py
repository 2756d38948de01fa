"""The route of advice."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.advice import AdviceView
from holdfast_protocol.states import Scope
from holdfast_service.advise.show import show_advice
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.context import Context
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["advice"])


@router.get("/v1/projects/{project}/runs/{run}/advice", summary="How often a run should save, and why")
def advice(project: str, run: str, context: Context, caller: Annotated[Principal, require(Scope.READ)]) -> AdviceView:
    return show_advice(context, caller, project, run)
