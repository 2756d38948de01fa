"""Routes of samples."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import Page
from holdfast_protocol.usage import ProjectSample, RunSample, SampledEvery
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.samples.list import Span, list_project_samples, list_run_samples
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, Limit, Moment, Reader

router = APIRouter(route_class=GuardedRoute, tags=["samples"])

Every = Annotated[SampledEvery, Query(description="An item for each hour, or for each day in UTC.")]
Since = Annotated[Moment | None, Query(description="Hours that begin at this moment or later.")]
Until = Annotated[Moment | None, Query(description="Hours that begin before this moment.")]


@router.get(
    "/v1/projects/{project}/samples",
    name="list_of_project",
    summary="What a project held, cost and made of its time, hour by hour or day by day, the newest first",
)
def of_project(
    *,
    project: str,
    context: Context,
    caller: Reader,
    every: Every = SampledEvery.HOUR,
    since: Since = None,
    until: Until = None,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[ProjectSample]:
    return list_project_samples(context, caller, project, Span(every, since, until, cursor, limit))


@router.get(
    "/v1/projects/{project}/runs/{run}/samples",
    name="list_of_run",
    summary="How a run fared, hour by hour or day by day, the newest first",
)
def of_run(
    *,
    project: str,
    run: str,
    context: Context,
    caller: Reader,
    every: Every = SampledEvery.HOUR,
    since: Since = None,
    until: Until = None,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[RunSample]:
    return list_run_samples(context, caller, project, run, Span(every, since, until, cursor, limit))
