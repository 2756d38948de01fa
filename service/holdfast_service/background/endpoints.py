"""Routes of controllers and workers: for tokens that may see, and change, the work for all projects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from holdfast_protocol.base import Page
from holdfast_protocol.service import ControllerView, PauseController, WorkerView
from holdfast_service.background.controllers import (
    list_controllers,
    list_workers,
    pause_controller,
    resume_controller,
    run_controller,
    show_controller,
)
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, page_of
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, Limit, PlatformOperator, PlatformReader
from holdfast_service.work.report import ControllerLoop

controllers_router = APIRouter(route_class=GuardedRoute, tags=["controllers"])
workers_router = APIRouter(route_class=GuardedRoute, tags=["workers"])


async def _loops(request: Request) -> tuple[ControllerLoop, ...]:
    """The controllers of this version: the application is told them, for they stand above this folder."""
    loops: tuple[ControllerLoop, ...] = request.app.state.loops
    return loops


Loops = Annotated[tuple[ControllerLoop, ...], Depends(_loops)]


@controllers_router.get(
    "/v1/controllers", name="list", summary="List the controllers: what is due, leased, done and failed, and their lag"
)
def list_all(
    context: Context, loops: Loops, caller: PlatformReader, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[ControllerView]:
    del caller
    found = list_controllers(context, loops)
    return page_of("controllers", found, lambda each: each.name, cursor=cursor, limit=limit)


@controllers_router.get("/v1/controllers/{name}", summary="Show a controller")
def show(name: str, context: Context, loops: Loops, caller: PlatformReader) -> ControllerView:
    del caller
    return show_controller(context, loops, name)


@controllers_router.post(
    "/v1/controllers/{name}/pause", summary="Pause a controller: passes under way end, and none begins"
)
def pause(name: str, body: PauseController, context: Context, loops: Loops, caller: PlatformOperator) -> ControllerView:
    return pause_controller(context, loops, caller, name, body)


@controllers_router.post("/v1/controllers/{name}/resume", summary="Let a paused controller go on")
def resume(name: str, context: Context, loops: Loops, caller: PlatformOperator) -> ControllerView:
    return resume_controller(context, loops, caller, name)


@controllers_router.post(
    "/v1/controllers/{name}/run", status_code=202, summary="Ask for a pass of a controller now, in one process"
)
def run(name: str, context: Context, loops: Loops, caller: PlatformOperator) -> ControllerView:
    return run_controller(context, loops, caller, name)


@workers_router.get("/v1/workers", name="list", summary="List the processes that serve or work")
def workers(
    context: Context, caller: PlatformReader, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[WorkerView]:
    del caller
    found = list_workers(context)
    key = lambda each: f"{each.started_at.isoformat()} {each.id}"  # noqa: E731
    return page_of("workers", found, key, cursor=cursor, limit=limit)
