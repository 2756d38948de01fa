"""Every controller, and the threads that run them: beside the requests, or in a `holdfast workers run`.

The catalog's rows are the work, so nothing is queued here and nothing is lost with a process. A controller's pass is
`reconcile(context)`; whether one begins, and what becomes of it, is in `background/reconcile.py`. Each has a thread
of its own in every process, because a long pass of one (reading bytes, deleting) would look like downtime to the
reaper.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
from sqlalchemy.orm import Session

from holdfast_service.background import operations_controller as operations
from holdfast_service.background.operation_kinds import OPERATION_KINDS
from holdfast_service.background.reconcile import run_pass
from holdfast_service.collect import controller as collect
from holdfast_service.collect import sweep_controller as sweep
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.holds import controller as holds
from holdfast_service.liveness import abandoned_uploads, stalled_attempts
from holdfast_service.records import controller as records
from holdfast_service.records.history import HistoryKeeper, settle_history
from holdfast_service.replicate import controller as replicate
from holdfast_service.retention import controller as retention
from holdfast_service.retention import purge
from holdfast_service.scrub import controller as scrub
from holdfast_service.scrub import repair, verify
from holdfast_service.settings import ServiceSettings
from holdfast_service.tiers import controller as tiers
from holdfast_service.webhooks import controller as webhooks
from holdfast_service.work.processes import Presence, ProcessKind
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

_log = structlog.get_logger("holdfast.background")

# Garbage is no hurry, and looking for it reads more of the catalog than anything else.
_COLLECT_EVERY_ROUNDS = 12
_HOLDS_EVERY_ROUNDS = 6
# A drill of an hour must not keep a prune of a second waiting.
_OPERATION_THREADS = 4
# One receiver that does not answer must not keep the others waiting.
_WEBHOOK_THREADS = 2


def loops_of(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """Every controller of the service."""
    interval = settings.controller_interval_seconds
    return (
        _controller("reap", interval, abandoned_uploads),
        _controller("liveness", interval, stalled_attempts),
        ControllerLoop("stores", interval, _watch_stores, own=True),
        ControllerLoop("records", interval, records.reconcile, records.backlog),
        _controller("prove", interval, verify),
        _controller("scrub", interval, scrub),
        _controller("repair", interval * repair.EVERY_ROUNDS, repair),
        _controller("holds", interval * _HOLDS_EVERY_ROUNDS, holds),
        _controller("replicate", interval, replicate),
        ControllerLoop(
            "operations",
            interval,
            partial(operations.reconcile, kinds=OPERATION_KINDS),
            operations.backlog,
            threads=_OPERATION_THREADS,
        ),
        _controller("retention", settings.retention_interval_seconds, retention),
        _controller("purge", interval * purge.EVERY_ROUNDS, purge),
        ControllerLoop("webhooks", interval, webhooks.reconcile, webhooks.backlog, threads=_WEBHOOK_THREADS),
        _controller("tiers", interval * tiers.EVERY_ROUNDS, tiers),
        _controller("collect", interval * _COLLECT_EVERY_ROUNDS, collect),
        _controller("sweep", interval * _COLLECT_EVERY_ROUNDS, sweep, sole=True),
    )


class Controller(Protocol):
    """A module with these two functions."""

    def reconcile(self, context: ServiceContext) -> ReconcileReport: ...

    def backlog(self, session: Session, context: ServiceContext) -> Backlog: ...


def _controller(name: str, interval_seconds: float, module: Controller, *, sole: bool = False) -> ControllerLoop:
    return ControllerLoop(name, interval_seconds, module.reconcile, module.backlog, sole=sole)


@dataclass(frozen=True, kw_only=True)
class StoresReport(ReconcileReport):
    """`away`: the roles whose store this process cannot use now."""

    away: tuple[str, ...] = ()


def _watch_stores(context: ServiceContext) -> StoresReport:
    problems = {attached.role.value: attached.watch.reconcile() for attached in context.stores}
    settle_history(context)  # so a process without traffic notices it too
    away = tuple(role for role, problem in problems.items() if problem is not None)
    return StoresReport(away=away, error=next((f"{role}: {problems[role]}" for role in away), None))


class Background:
    """Start once, stop once. A process that leaves the controllers to others still looks after itself."""

    def __init__(
        self, context: ServiceContext, loops: Sequence[ControllerLoop], kind: ProcessKind, *, controllers: bool = True
    ) -> None:
        self._context = context
        self._presence = Presence(context, kind)
        self._history = HistoryKeeper(context)
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"holdfast-{each.name}", daemon=True)
            for each in loops
            if controllers or each.own
            for _ in range(each.threads)
        ]

    def start(self) -> None:
        """Raises ProblemError if the database is away."""
        self._presence.enter()
        self._history.start()
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout_seconds: float) -> bool:
        """Lets the steps in hand end, waiting so long for all together. False if one still runs: it may be cut off, for
        every step of a pass may run twice."""
        self._context.stopping.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._presence.leave()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, each: ControllerLoop) -> None:
        stopping = self._context.stopping
        # Passes are further apart, but somebody may want one now. When a sole pass is due the catalog says.
        look_every = min(each.interval_seconds, self._context.settings.controller_interval_seconds)
        due_at = float("-inf")
        while not stopping.is_set():
            try:
                due = each.sole or time.monotonic() >= due_at
                if run_pass(self._context, each, due=due, keeping=self._presence.keeping) is not None:
                    due_at = time.monotonic() + each.interval_seconds
            except ProblemError as error:  # the database is away
                _log.warning("pass_failed", controller=each.name, error=error.detail)
            except Exception:
                _log.exception("pass_failed", controller=each.name)
            stopping.wait(look_every)
