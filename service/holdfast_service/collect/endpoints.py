"""Routes of garbage: what would go, a pass now, and sweeps."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.service import OperationView
from holdfast_protocol.stores import CollectionPlan, StartSweep, SweepReport
from holdfast_service.collect import on_demand as operations
from holdfast_service.collect.plan import plan_collection
from holdfast_service.context import Context
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import IdempotencyKey, PlatformOperator, PlatformReader, Reader

collections_router = APIRouter(route_class=GuardedRoute, tags=["collections"])
sweeps_router = APIRouter(route_class=GuardedRoute, tags=["sweeps"])


@collections_router.get("/v1/collections/plan", summary="What the collector would delete now, and what waits for what")
def plan(context: Context, caller: Reader, project: str | None = None) -> CollectionPlan:
    return plan_collection(context, caller, project)


@collections_router.post(
    "/v1/collections", name="start", summary="Collect now, after a look at every copy", status_code=202
)
def collect_now(context: Context, caller: PlatformOperator, idempotency_key: IdempotencyKey = None) -> OperationView:
    return operations.start_collection(context, caller, idempotency_key)


@sweeps_router.get("/v1/sweeps", name="list", summary="What the last sweep of each store found")
def sweeps(context: Context, caller: PlatformReader) -> SweepReport:
    del caller
    return operations.last_sweeps(context)


@sweeps_router.post(
    "/v1/sweeps", name="start", summary="Compare stores with the catalog, and delete what no row knows", status_code=202
)
def sweep_now(
    body: StartSweep, context: Context, caller: PlatformOperator, idempotency_key: IdempotencyKey = None
) -> OperationView:
    return operations.start_sweep(context, caller, body, idempotency_key)
