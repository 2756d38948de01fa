"""Routes of controllers and workers: for those who may look at, and change, the work for all projects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from holdfast_protocol.base import Page
from holdfast_protocol.controllers import ControllerView, PauseController, WorkerView
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.catalog.rounds import Round
from holdfast_service.context import Context
from holdfast_service.controllers.control import pause_controller, resume_controller, run_controller
from holdfast_service.controllers.list_workers import list_workers
from holdfast_service.controllers.look import list_controllers, show_controller
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["controllers"])


def _rounds(request: Request) -> tuple[Round, ...]:
    """The controllers of this version: the application is told them, for they stand above this folder."""
    rounds: tuple[Round, ...] = request.app.state.rounds
    return rounds


Rounds = Annotated[tuple[Round, ...], Depends(_rounds)]
Reader = Annotated[Principal, require(Scope.READ)]
Operator = Annotated[Principal, require(Scope.OPERATE)]


@router.get("/v1/controllers", summary="List the controllers: what is due, leased, done and failed, and their lag")
def list_all(context: Context, rounds: Rounds, caller: Reader) -> Page[ControllerView]:
    return Page(items=list_controllers(context, rounds, caller))


@router.get("/v1/controllers/{name}", summary="Show a controller")
def show(name: str, context: Context, rounds: Rounds, caller: Reader) -> ControllerView:
    return show_controller(context, rounds, caller, name)


@router.post("/v1/controllers/{name}/pause", summary="Pause a controller: rounds under way end, and none begins")
def pause(name: str, body: PauseController, context: Context, rounds: Rounds, caller: Operator) -> ControllerView:
    return pause_controller(context, rounds, caller, name, body)


@router.post("/v1/controllers/{name}/resume", summary="Let a paused controller go on")
def resume(name: str, context: Context, rounds: Rounds, caller: Operator) -> ControllerView:
    return resume_controller(context, rounds, caller, name)


@router.post("/v1/controllers/{name}/run", summary="Ask for a round of a controller now, in one process")
def run(name: str, context: Context, rounds: Rounds, caller: Operator) -> ControllerView:
    return run_controller(context, rounds, caller, name)


@router.get("/v1/workers", summary="List the processes that serve or work")
def workers(context: Context, caller: Reader) -> Page[WorkerView]:
    return Page(items=list_workers(context, caller))
