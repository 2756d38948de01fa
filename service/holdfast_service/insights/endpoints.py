"""Routes of goodput and of advice on how often to save."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.runs import AdviceView, Goodput
from holdfast_protocol.states import Scope
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.insights.advice import show_advice
from holdfast_service.insights.goodput import read_goodput
from holdfast_service.web.guarded_route import GuardedRoute

# The route of a run's goodput.

goodput_router = APIRouter(route_class=GuardedRoute, tags=["goodput"])


@goodput_router.get("/v1/projects/{project}/runs/{run}/goodput", summary="Where a run's time and steps went")
def goodput(project: str, run: str, context: Context, caller: Annotated[Principal, require(Scope.READ)]) -> Goodput:
    return read_goodput(context, caller, project, run)


# The route of advice.

advice_router = APIRouter(route_class=GuardedRoute, tags=["advice"])


@advice_router.get("/v1/projects/{project}/runs/{run}/advice", summary="How often a run should save, and why")
def advice(project: str, run: str, context: Context, caller: Annotated[Principal, require(Scope.READ)]) -> AdviceView:
    return show_advice(context, caller, project, run)
