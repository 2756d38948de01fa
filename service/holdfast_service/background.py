"""Every controller, and the threads that run them: beside the requests, or in a `holdfast worker`.

The catalog's rows are the work, so nothing is queued here and nothing is lost with a process. A controller's round is
`tick(context)`; whether one begins, and what becomes of it, is in `controllers/round.py`. Each has a thread of its own
in every process, because a long round of one (reading bytes, deleting) would look like downtime to the reaper.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog

import holdfast_service.collect.sweep_tick
import holdfast_service.collect.tick
import holdfast_service.holds.mirror
import holdfast_service.operations.claim
import holdfast_service.operations.tick
import holdfast_service.reap.tick
import holdfast_service.records.due
import holdfast_service.records.tick
import holdfast_service.replicate.tick
import holdfast_service.retention.purge
import holdfast_service.retention.tick
import holdfast_service.scrub.heal
import holdfast_service.scrub.prove
import holdfast_service.scrub.rescrub
import holdfast_service.tiers.tick
from holdfast_service.catalog.processes import ProcessKind
from holdfast_service.catalog.rounds import Round, RoundReport
from holdfast_service.context import ServiceContext
from holdfast_service.controllers.presence import Presence
from holdfast_service.controllers.round import run_round
from holdfast_service.errors import ProblemError
from holdfast_service.operation_kinds import OPERATION_KINDS
from holdfast_service.settings import ServiceSettings

_log = structlog.get_logger("holdfast.background")

# Garbage is no hurry, and looking for it reads more of the catalog than anything else.
_COLLECT_EVERY_ROUNDS = 12
_HEAL_EVERY_ROUNDS = 12
_HOLDS_EVERY_ROUNDS = 6
# A drill of an hour must not keep a prune of a second waiting.
_OPERATION_THREADS = 4


def rounds_of(settings: ServiceSettings) -> tuple[Round, ...]:
    """Every controller of the service."""
    interval = settings.controller_interval_seconds
    return (
        Round("reap", interval, holdfast_service.reap.tick.tick, holdfast_service.reap.tick.backlog),
        Round("stores", interval, _watch_stores, own=True),
        Round("records", interval, holdfast_service.records.tick.tick, holdfast_service.records.due.backlog),
        Round("prove", interval, holdfast_service.scrub.prove.tick, holdfast_service.scrub.prove.backlog),
        Round("scrub", interval, holdfast_service.scrub.rescrub.tick, holdfast_service.scrub.rescrub.backlog),
        Round(
            "heal",
            interval * _HEAL_EVERY_ROUNDS,
            holdfast_service.scrub.heal.tick,
            holdfast_service.scrub.heal.backlog,
        ),
        Round(
            "holds",
            interval * _HOLDS_EVERY_ROUNDS,
            holdfast_service.holds.mirror.tick,
            holdfast_service.holds.mirror.backlog,
        ),
        Round("replicate", interval, holdfast_service.replicate.tick.tick, holdfast_service.replicate.tick.backlog),
        Round(
            "operations",
            interval,
            partial(holdfast_service.operations.tick.tick, kinds=OPERATION_KINDS),
            holdfast_service.operations.claim.backlog,
            threads=_OPERATION_THREADS,
        ),
        Round(
            "retention",
            settings.retention_interval_seconds,
            holdfast_service.retention.tick.tick,
            holdfast_service.retention.tick.backlog,
        ),
        Round(
            "purge",
            interval * holdfast_service.retention.purge.EVERY_ROUNDS,
            holdfast_service.retention.purge.tick,
            holdfast_service.retention.purge.backlog,
        ),
        Round("tiers", interval, holdfast_service.tiers.tick.tick, holdfast_service.tiers.tick.backlog),
        Round(
            "collect",
            interval * _COLLECT_EVERY_ROUNDS,
            holdfast_service.collect.tick.tick,
            holdfast_service.collect.tick.backlog,
        ),
        Round(
            "sweep",
            interval * _COLLECT_EVERY_ROUNDS,
            holdfast_service.collect.sweep_tick.tick,
            holdfast_service.collect.sweep_tick.backlog,
            sole=True,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class StoresReport(RoundReport):
    """`away`: the roles whose store this process cannot use now."""

    away: tuple[str, ...] = ()


def _watch_stores(context: ServiceContext) -> StoresReport:
    problems = {attached.role.value: attached.watch.tick() for attached in context.stores}
    away = tuple(role for role, problem in problems.items() if problem is not None)
    return StoresReport(away=away, error=next((f"{role}: {problems[role]}" for role in away), None))


class Background:
    """Start once, stop once. A process that leaves the controllers to others still looks after itself."""

    def __init__(
        self, context: ServiceContext, rounds: Sequence[Round], kind: ProcessKind, *, controllers: bool = True
    ) -> None:
        self._context = context
        self._presence = Presence(context, kind)
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"holdfast-{each.name}", daemon=True)
            for each in rounds
            if controllers or each.own
            for _ in range(each.threads)
        ]

    def start(self) -> None:
        """Raises ProblemError if the database is away."""
        self._presence.enter()
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout_seconds: float) -> bool:
        """Lets the steps in hand end, waiting so long for all together. False if one still runs: it may be cut off, for
        every step of a round may run twice."""
        self._context.stopping.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._presence.leave()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, each: Round) -> None:
        stopping = self._context.stopping
        # Rounds are further apart, but somebody may want one now. When a sole round is due the catalog says.
        look_every = min(each.interval_seconds, self._context.settings.controller_interval_seconds)
        due_at = float("-inf")
        while not stopping.is_set():
            try:
                due = each.sole or time.monotonic() >= due_at
                if run_round(self._context, each, due=due, keeping=self._presence.keeping) is not None:
                    due_at = time.monotonic() + each.interval_seconds
            except ProblemError as error:  # the database is away
                _log.warning("round_failed", controller=each.name, error=error.detail)
            except Exception:
                _log.exception("round_failed", controller=each.name)
            stopping.wait(look_every)
