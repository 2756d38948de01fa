"""The route of forecasts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter

from holdfast_protocol.states import Scope
from holdfast_protocol.usage import CostForecast, ForecastCost
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.context import Context
from holdfast_service.forecast.forecast_cost import forecast_cost
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["usage"])


@router.post("/v1/projects/{project}/runs/{run}/cost-forecast", summary="What a run would cost a month under a policy")
def forecast(
    project: str, run: str, body: ForecastCost, context: Context, caller: Annotated[Principal, require(Scope.READ)]
) -> CostForecast:
    return forecast_cost(context, caller, project, run, body)
