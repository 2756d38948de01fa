"""What the processes remember, against the database: asked before what cannot be taken back (protocol rule 36).

`memory.py` is what a process remembers, `kept_memory.py` its copy beside the data, `went_back.py` the question.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import structlog

from holdfast_service.catalog.memory import forget_long_gone, note_change
from holdfast_service.catalog.went_back import prove_history
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError, WentBackError
from holdfast_service.stores.base import StoreError

_LOOK_SECONDS = 1.0
_REFRESHED_AFTER_SECONDS = 6 * 3600.0

_log = structlog.get_logger("holdfast.history")


def settle_history(context: ServiceContext) -> None:
    """Outside of any transaction, before an attempt is opened, a restore point chosen or something deleted. A store
    that does not answer is asked the next time. Raises WentBackError."""
    server = prove_history(context.database)
    for attached in context.stores:
        if attached.watch.away:
            continue
        try:
            attached.watch.kept_memory.compare(server)
        except StoreError as error:
            _log.warning("history_not_compared", store=attached.role.value, error=str(error))


def keep_history(context: ServiceContext) -> None:
    """Brings what lies beside the data up to date, in each store that answers. Never raises."""
    for attached in context.stores:
        if attached.watch.away:
            continue
        try:
            attached.watch.kept_memory.keep()
        except (StoreError, ProblemError) as error:
            _log.info("history_not_kept", store=attached.role.value, error=str(error))


def begin_history(context: ServiceContext) -> None:
    """At the start of a process, once its stores are attached: compares, and leaves a mark of its own. What is found
    is said by /readyz, and refuses by itself."""
    try:
        settle_history(context)
        with context.database.transaction() as session:
            forget_long_gone(session)
            note_change(session, "a process of the service was started")
        keep_history(context)
        for attached in context.stores:
            if not attached.watch.away:
                attached.watch.kept_memory.forget_the_gone()
    except WentBackError as error:
        _log.error("database_went_back", reason=error.detail, lost=error.lost)
    except StoreError as error:
        _log.warning("history_not_compared", error=str(error))


class HistoryKeeper:
    """A thread that keeps the memory beside the data: a moment after each change, and a few times a day without one,
    so that nobody takes the process for gone."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._thread = threading.Thread(target=self._run, name="holdfast-history", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        memory, changed_at = self._context.database.memory, time.monotonic()
        while not self._context.stopping.is_set():
            if memory.changed.wait(_LOOK_SECONDS):
                memory.changed.clear()
                changed_at = time.monotonic()
                keep_history(self._context)
            elif time.monotonic() - changed_at > _REFRESHED_AFTER_SECONDS:
                with suppress(ProblemError), self._context.database.transaction() as session:
                    note_change(session, "a process of the service is alive")
