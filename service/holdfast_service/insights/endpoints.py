"""Routes of goodput and of advice on how often to save."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.runs import AdviceView, Goodput
from holdfast_service.context import Context
from holdfast_service.insights.advice import show_advice
from holdfast_service.insights.goodput import read_goodput
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Reader

router = APIRouter(route_class=GuardedRoute, tags=["runs"])


@router.get("/v1/projects/{project}/runs/{run}/goodput", summary="Where a run's time and steps went")
def goodput(project: str, run: str, context: Context, caller: Reader) -> Goodput:
    return read_goodput(context, caller, project, run)


@router.get("/v1/projects/{project}/runs/{run}/advice", summary="How often a run should save, and why")
def advice(project: str, run: str, context: Context, caller: Reader) -> AdviceView:
    return show_advice(context, caller, project, run)
