"""Routes of what nobody needs: what would go, a pass now, and sweeps."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.service import OperationView
from holdfast_protocol.states import Scope
from holdfast_protocol.stores import CollectionPlan, StartSweep, SweepReport
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.collect import on_demand as operations
from holdfast_service.collect.plan import plan_collection
from holdfast_service.context import Context
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["collection"])

Reader = Annotated[Principal, require(Scope.READ)]
Operator = Annotated[Principal, require(Scope.OPERATE)]


@router.get("/v1/collection", summary="What the collector would delete now, and what waits for what")
def plan(context: Context, caller: Reader, project: str | None = None) -> CollectionPlan:
    return plan_collection(context, caller, project)


@router.post("/v1/collection", summary="Collect now, after a look at every copy", status_code=202)
def collect_now(context: Context, caller: Operator) -> OperationView:
    return operations.start_collection(context, caller)


@router.get("/v1/sweeps", summary="What the last sweep of each store found")
def sweeps(context: Context, caller: Reader) -> SweepReport:
    return operations.last_sweeps(context, caller)


@router.post("/v1/sweeps", summary="Compare stores with the catalog, and delete what no row knows", status_code=202)
def sweep_now(body: StartSweep, context: Context, caller: Operator) -> OperationView:
    return operations.start_sweep(context, caller, body)
