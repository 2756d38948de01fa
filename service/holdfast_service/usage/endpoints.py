"""Routes of usage, cost, prices and forecasts."""

from __future__ import annotations

from fastapi import APIRouter, Response

from holdfast_protocol.base import Page
from holdfast_protocol.usage import CostForecast, CostView, ForecastCost, PriceList, PriceListView, UsageView
from holdfast_service.context import Context
from holdfast_service.usage.cost import put_prices, show_cost, show_prices
from holdfast_service.usage.cost_forecast import forecast_cost
from holdfast_service.usage.show_usage import list_usage, show_usage
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, IfMatch, Limit, PlatformAdmin, Reader, tagged

router = APIRouter(route_class=GuardedRoute, tags=["usage"])
prices_router = APIRouter(route_class=GuardedRoute, tags=["prices"])

# Each project's figures are counted anew: a page of them is a longer piece of work than a page of rows.
_PAGE = 20


@router.get("/v1/usage", name="list", summary="What each project takes up, by name")
def of_projects(
    *,
    context: Context,
    caller: Reader,
    cursor: Cursor = None,
    limit: Limit = _PAGE,
) -> Page[UsageView]:
    return list_usage(context, caller, cursor=cursor, limit=limit)


@router.get("/v1/projects/{project}/usage", summary="What a project takes up, by store and storage class")
def of_project(project: str, context: Context, caller: Reader) -> UsageView:
    return show_usage(context, caller, project)


@router.get("/v1/projects/{project}/runs/{run}/usage", summary="What a run takes up, by store and storage class")
def of_run(project: str, run: str, context: Context, caller: Reader) -> UsageView:
    return show_usage(context, caller, project, run)


@router.get("/v1/projects/{project}/cost", summary="What storing a project costs a month, as it is now")
def cost_of_project(project: str, context: Context, caller: Reader) -> CostView:
    return show_cost(context, caller, project)


@router.get("/v1/projects/{project}/runs/{run}/cost", summary="What storing a run costs a month, as it is now")
def cost_of_run(project: str, run: str, context: Context, caller: Reader) -> CostView:
    return show_cost(context, caller, project, run)


@prices_router.get("/v1/prices", name="show", summary="The prices that costs are counted with")
def prices(context: Context, caller: Reader, response: Response) -> PriceListView:
    del caller
    return tagged(response, show_prices(context))


@prices_router.put("/v1/prices", name="put", summary="Replace the prices")
def put(
    body: PriceList, context: Context, caller: PlatformAdmin, response: Response, if_match: IfMatch = None
) -> PriceListView:
    return tagged(response, put_prices(context, caller, body, if_match))


@router.post(
    "/v1/projects/{project}/runs/{run}/cost/forecast",
    name="forecast_cost",
    summary="What a run would cost a month under a policy",
)
def forecast(project: str, run: str, body: ForecastCost, context: Context, caller: Reader) -> CostForecast:
    return forecast_cost(context, caller, project, run, body)
