"""Runs the controllers beside the requests: one plain thread for each, in every process, stoppable.

The catalog's rows are the work, so nothing is queued here and nothing is lost with a process. A controller's round is
`tick(context)`. A failed one is logged and the next comes at its time. Each has a thread of its own because a long
round of one (reading bytes, deleting) would look like downtime to the reaper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

import holdfast_service.collect.tick
import holdfast_service.operations.tick
import holdfast_service.reap.tick
import holdfast_service.scrub.heal
import holdfast_service.scrub.prove
import holdfast_service.scrub.rescrub
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreError

_log = structlog.get_logger("holdfast.background")

# Garbage is no hurry, and looking for it reads more of the catalog than anything else.
_COLLECT_EVERY_ROUNDS = 12
_HEAL_EVERY_ROUNDS = 12


@dataclass(frozen=True)
class Round:
    """One controller: its `tick` is called, then `interval_seconds` pass."""

    name: str
    interval_seconds: float
    tick: Callable[[ServiceContext], object]


def rounds_of(settings: ServiceSettings) -> tuple[Round, ...]:
    """Every controller of the service."""
    interval = settings.controller_interval_seconds
    return (
        Round("reap", interval, holdfast_service.reap.tick.tick),
        Round("stores", interval, _watch_stores),
        Round("prove", interval, holdfast_service.scrub.prove.tick),
        Round("scrub", interval, holdfast_service.scrub.rescrub.tick),
        Round("heal", interval * _HEAL_EVERY_ROUNDS, holdfast_service.scrub.heal.tick),
        Round("operations", interval, holdfast_service.operations.tick.tick),
        Round("collect", interval * _COLLECT_EVERY_ROUNDS, holdfast_service.collect.tick.tick),
    )


def _watch_stores(context: ServiceContext) -> dict[str, str | None]:
    return {attached.role.value: attached.watch.tick() for attached in context.stores}


class Background:
    """Start once, stop once."""

    def __init__(self, context: ServiceContext, rounds: Sequence[Round]) -> None:
        self._context = context
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"holdfast-{each.name}", daemon=True)
            for each in rounds
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout_seconds: float) -> bool:
        """Lets rounds under way end, waiting so long for each. False if one still runs: it may be cut off, for every
        step of a round may run twice."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, each: Round) -> None:
        while not self._stopping.is_set():
            try:
                report = each.tick(self._context)
                _log.debug("round", controller=each.name, report=str(report))
            except (ProblemError, StoreError) as error:  # database or store are away
                _log.warning("round_failed", controller=each.name, error=str(error))
            except Exception:
                _log.exception("round_failed", controller=each.name)
            self._stopping.wait(each.interval_seconds)
