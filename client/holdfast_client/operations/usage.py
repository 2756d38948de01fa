"""What checkpoints take up, and what that costs. See holdfast_protocol.usage."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.operations.base import Operations
from holdfast_client.operations.pages import all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.usage import CostForecast, CostView, ForecastCost, PriceList, PriceListView, UsageView

# Every reference of a project is counted: with millions of them that takes longer than any other call.
_COUNTING_SECONDS = 300


class UsageOperations(Operations):
    def usage(self, project: str, run: str | None = None) -> UsageView:
        """Of a project, or of one of its runs."""
        return self.transport.call("GET", _route(project, run, "usage"), UsageView, waits_seconds=_COUNTING_SECONDS)

    def usage_of_projects(self, *, cursor: str | None = None, limit: int | None = None) -> Page[UsageView]:
        return self.transport.call(
            "GET",
            path("usage"),
            Page[UsageView],
            params={"cursor": cursor, "limit": limit},
            waits_seconds=_COUNTING_SECONDS,
        )

    def all_usage(self) -> Iterator[UsageView]:
        return all_items(lambda cursor: self.usage_of_projects(cursor=cursor))

    def cost(self, project: str, run: str | None = None) -> CostView:
        """What storing it costs a month, as it is now."""
        return self.transport.call("GET", _route(project, run, "cost"), CostView, waits_seconds=_COUNTING_SECONDS)

    def forecast_cost(self, project: str, run: str, request: ForecastCost) -> CostForecast:
        """What the run would cost a month under these policies, if it goes on as it has."""
        route = path("projects", project, "runs", run, "cost-forecast")
        return self.transport.call("POST", route, CostForecast, body=request, waits_seconds=_COUNTING_SECONDS)

    def prices(self) -> PriceListView:
        return self.transport.call("GET", path("prices"), PriceListView)

    def put_prices(self, prices: PriceList) -> PriceListView:
        """Replaces the whole list."""
        return self.transport.call("PUT", path("prices"), PriceListView, body=prices)


def _route(project: str, run: str | None, what: str) -> str:
    return path("projects", project, what) if run is None else path("projects", project, "runs", run, what)
