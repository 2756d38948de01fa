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

import structlog

import holdfast_service.catalog_check.check
import holdfast_service.collect.on_demand
import holdfast_service.comparisons.compare_values
import holdfast_service.replicate.drill
import holdfast_service.scrub.on_demand
from holdfast_service.attached_stores import controller as attached_stores
from holdfast_service.background.cadence import Changes, Pause
from holdfast_service.background.reconcile import run_pass
from holdfast_service.collect import controller as collect
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.events import controller as events
from holdfast_service.holds import controller as holds
from holdfast_service.liveness import controller as liveness
from holdfast_service.operations import controller as operations
from holdfast_service.operations.queue import Handler
from holdfast_service.records import controller as records
from holdfast_service.records.history import HistoryKeeper
from holdfast_service.replicate import controller as replicate
from holdfast_service.retention import controller as retention
from holdfast_service.samples import controller as samples
from holdfast_service.scrub import controller as scrub
from holdfast_service.settings import ServiceSettings
from holdfast_service.tallies import controller as tallies
from holdfast_service.tiers import controller as tiers
from holdfast_service.webhooks import controller as webhooks
from holdfast_service.work.processes import Presence, ProcessKind
from holdfast_service.work.report import ControllerLoop

_log = structlog.get_logger("holdfast.background")

# Every kind of operation, and the handler that carries it out. A verb registers its own by one line.
#
# A handler is `handler(context, run) -> dict`: it moves bytes outside of transactions, calls `run.progress` between two
# steps, may be begun again by another worker at any point, and returns the result as JSON values. What it raises
# becomes the operation's reason: a ProblemError or a StoreError says what to do, anything else is told as a bug.
OPERATION_KINDS: dict[str, Handler] = {
    "catalog.check": holdfast_service.catalog_check.check.run_check,
    "collect": holdfast_service.collect.on_demand.run_collection,
    "sweep": holdfast_service.collect.on_demand.run_sweep,
    "compare": holdfast_service.comparisons.compare_values.run_comparison,
    "drill": holdfast_service.replicate.drill.run_drill,
    "scrub": holdfast_service.scrub.on_demand.run_scrub,
}


_ROOMS = (
    liveness,
    attached_stores,
    records,
    scrub,
    holds,
    replicate,
    retention,
    events,
    webhooks,
    tiers,
    collect,
    tallies,
    samples,
)


def loops_of(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """Every controller of the service."""
    return (*(loop for room in _ROOMS for loop in room.loops(settings)), *operations.loops(settings, OPERATION_KINDS))


_HELPERS_LOOK_LATER = 4
LONGEST_YIELD_SECONDS = 20.0
"""A pass waits so long for calls of training jobs. Nothing is due more exactly than that, and leases are renewed
meanwhile."""


class Background:
    """Start once, stop once. A process that leaves the controllers to others still looks after itself."""

    def __init__(
        self, context: ServiceContext, loops: Sequence[ControllerLoop], kind: ProcessKind, *, controllers: bool = True
    ) -> None:
        self._context = context
        self._presence = Presence(context, kind)
        self._history = HistoryKeeper(context)
        self._changes = Changes(context, context.settings.controller_interval_seconds)
        self._threads = [
            threading.Thread(target=self._run, args=(each, thread > 0), name=f"holdfast-{each.name}", daemon=True)
            for each in loops
            if controllers or each.own
            for thread in range(each.threads)
        ]

    def start(self) -> None:
        """Raises ProblemError if the database is unavailable."""
        self._presence.enter()
        self._history.start()
        self._changes.start()
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout_seconds: float) -> bool:
        """Lets the steps in hand end, waiting so long for all together. False if one still runs: it may be cut off, for
        every step of a pass may run twice. Also after a start that has failed."""
        self._context.stopping.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        self._presence.leave()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, each: ControllerLoop, helps: bool) -> None:
        """`helps`: another thread looks after the same rows, so this one looks seldom unless something changed."""
        look_seconds = self._context.settings.controller_interval_seconds
        # When a sole pass is due the catalog says.
        interval = min(each.interval_seconds, look_seconds) if each.sole else each.interval_seconds
        longest = each.longest_pauses * look_seconds * (_HELPERS_LOOK_LATER if helps else 1)
        pause = Pause(interval, longest)
        due_at = float("-inf")
        while not self._context.stopping.is_set():
            due, known = time.monotonic() >= due_at, self._changes.count
            if not each.own:
                self._context.load.yield_to_callers(LONGEST_YIELD_SECONDS, self._context.stopping)
            try:
                report = run_pass(self._context, each, due=due, keeping=self._presence.keeping)
            except ProblemError as error:  # the database is unavailable
                _log.warning("pass_failed", controller=each.name, error=error.detail)
                due_at = time.monotonic() + look_seconds
            except Exception:
                _log.exception("pass_failed", controller=each.name)
                due_at = time.monotonic() + look_seconds
            else:
                if report is not None or due:
                    due_at = time.monotonic() + pause.next(idle=report is None or report.idle)
                if report is not None and not report.idle:
                    self._changes.note()
            due_at = self._changes.wait(each.name, pause, due_at, known)
