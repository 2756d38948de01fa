"""The route of a run's goodput."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.goodput import Goodput
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.context import Context
from holdfast_service.goodput.read import read_goodput
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["goodput"])


@router.get("/v1/projects/{project}/runs/{run}/goodput", summary="Where a run's time and steps went")
def goodput(project: str, run: str, context: Context, caller: Annotated[Principal, require(Scope.READ)]) -> Goodput:
    return read_goodput(context, caller, project, run)
