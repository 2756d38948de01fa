"""The controller `stores`: every process asks its own stores whether they answer."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_service.context import ServiceContext
from holdfast_service.records.history import settle_history
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.report import ControllerLoop, ReconcileReport


@dataclass(frozen=True, kw_only=True)
class StoresReport(ReconcileReport):
    """`unavailable`: the roles whose store this process cannot use now."""

    unavailable: tuple[str, ...] = ()


def reconcile(context: ServiceContext) -> StoresReport:
    problems = {attached.role.value: attached.watch.reconcile() for attached in context.stores}
    settle_history(context)  # so a process without traffic notices it too
    unavailable = tuple(role for role, problem in problems.items() if problem is not None)
    told = [f"{role}: {problems[role]}" for role in unavailable]
    for attached in context.stores:
        if (why := attached.watch.not_probed) is not None:
            told.append(f"{attached.role.value}: what it enforces was not found out: {why}")
    return StoresReport(unavailable=unavailable, error=next(iter(told), None))


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop("stores", settings.controller_interval_seconds, reconcile, own=True),)
