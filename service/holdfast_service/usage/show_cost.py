"""What storing a project or a run costs a month, as it is now."""

from __future__ import annotations

from holdfast_protocol.usage import CostView
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.usage.cost import cost_of
from holdfast_service.usage.prices import show_prices
from holdfast_service.usage.show_usage import show_usage


def show_cost(context: ServiceContext, caller: Principal, project: str, run: str | None = None) -> CostView:
    """Raises `forbidden`, `project_not_found` and `run_not_found`."""
    usage = show_usage(context, caller, project, run)
    return cost_of(show_prices(context).prices, usage)
