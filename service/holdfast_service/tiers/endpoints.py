"""Routes of tiers: the plan of a run, and thaws."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.tiers import RequestThaw, ThawView, TierPlan
from holdfast_service.context import Context
from holdfast_service.tiers.show_plan import plan_run
from holdfast_service.tiers.thaw_requests import request_thaw, show_thaw
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Operator, Reader

router = APIRouter(route_class=GuardedRoute, tags=["tiers"])


@router.get("/v1/projects/{project}/runs/{run}/tiers/plan", summary="What would get cold when; nothing moves")
def plan(project: str, run: str, context: Context, caller: Reader) -> TierPlan:
    return plan_run(context, caller, project, run)


@router.post(
    "/v1/checkpoints/{checkpoint_id}/thaw", status_code=202, summary="Make a cold checkpoint readable for some days"
)
def thaw(checkpoint_id: str, body: RequestThaw, context: Context, caller: Operator) -> ThawView:
    return request_thaw(context, caller, checkpoint_id, body)


@router.get(
    "/v1/checkpoints/{checkpoint_id}/thaw", name="show_thaw", summary="How far a thaw is, or what one would take"
)
def show_thaw_of(checkpoint_id: str, context: Context, caller: Reader) -> ThawView:
    return show_thaw(context, caller, checkpoint_id)
