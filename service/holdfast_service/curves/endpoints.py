"""The route of a run's metric curves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.checkpoints import Step
from holdfast_protocol.runs import MOST_CURVES, MOST_POINTS_SHOWN, MetricName, MetricsHistory
from holdfast_service.context import Context
from holdfast_service.curves.history import Asked, read_history
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Reader

router = APIRouter(route_class=GuardedRoute, tags=["runs"])


@router.get(
    "/v1/projects/{project}/runs/{run}/metrics-history",
    name="metrics_history",
    summary="Show what a run's jobs have measured, step by step",
)
def metrics_history(
    *,
    project: str,
    run: str,
    context: Context,
    caller: Reader,
    name: Annotated[
        list[MetricName] | None, Query(max_length=MOST_CURVES, description="One or several; without it all of them.")
    ] = None,
    from_step: Annotated[Step | None, Query()] = None,
    to_step: Annotated[Step | None, Query()] = None,
    attempt: Annotated[
        int | None,
        Query(ge=1, le=2**31 - 1, description="All points of this attempt, and not those on the run's lineage."),
    ] = None,
    points: Annotated[int, Query(ge=4, le=MOST_POINTS_SHOWN, description="Of each metric, at most.")] = 500,
) -> MetricsHistory:
    asked = Asked(names=name or (), from_step=from_step, to_step=to_step, attempt=attempt, most=points)
    return read_history(context, caller, project, run, asked)
