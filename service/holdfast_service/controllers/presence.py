"""Says in the catalog that this process is alive, and renews the leases of the rounds that are under way in it.
It warns where the processes do not all have the same stores.

A process that is killed falls silent, and its leases run out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import structlog
from sqlalchemy import update

from holdfast_service.catalog.attachments import attached_here, what_differs
from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.processes import ProcessKind, say_alive, say_goodbye
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError

_log = structlog.get_logger("holdfast.presence")

_EVERY_SECONDS = 10.0
# A lease survives two renewals that fail.
_PER_LEASE = 3


class Presence:
    """Enter once, leave once; `keep` from any thread."""

    def __init__(self, context: ServiceContext, kind: ProcessKind) -> None:
        self._context = context
        self._kind = kind
        self._lock = threading.Lock()
        self._leases: set[str] = set()
        self._told: list[str] = []
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-presence", daemon=True)

    def enter(self) -> None:
        """Raises ProblemError if the database is away."""
        self._say()
        self._thread.start()

    def leave(self) -> None:
        """A database that is away hears nothing; to the others this process has fallen silent then."""
        self._leaving.set()
        self._thread.join(_EVERY_SECONDS)
        try:
            with self._context.database.transaction() as session:
                say_goodbye(session, self._context.process_id)
        except ProblemError as error:
            _log.warning("not_said", error=error.detail)

    @contextmanager
    def keeping(self, lease_token: str | None) -> Iterator[None]:
        """The lease is renewed while the block is under way."""
        if lease_token is None:
            yield
            return
        with self._lock:
            self._leases.add(lease_token)
        try:
            yield
        finally:
            with self._lock:
                self._leases.discard(lease_token)

    def _run(self) -> None:
        pause = min(_EVERY_SECONDS, self._context.settings.lease_seconds / _PER_LEASE)
        while not self._leaving.wait(pause):
            try:
                self._say()
            except ProblemError as error:
                _log.warning("not_said", error=error.detail)
            except Exception:
                _log.exception("not_said")

    def _say(self) -> None:
        with self._lock:
            leases = sorted(self._leases)
        with self._context.database.transaction() as session:
            if leases:  # before the process's own row: whoever notes a round locks them in this order too
                until = database_now(session) + timedelta(seconds=self._context.settings.lease_seconds)
                session.execute(
                    update(Controller).where(Controller.lease_token.in_(leases)).values(leased_until=until),
                    execution_options={"synchronize_session": False},
                )
            say_alive(session, self._context.process_id, self._kind, attached_here(self._context))
        with self._context.database.read() as session:
            differs = what_differs(session, self._context)
        if differs != self._told:
            for sentence in differs:
                _log.warning("stores_differ", reason=sentence)
            self._told = differs
