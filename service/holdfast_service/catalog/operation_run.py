"""One try of an operation, as its handler sees it: what to do, and a way to say how far it is.

A handler calls `progress` between two steps. That renews the lease, so that nobody else begins it too, and it raises
where the handler must stop: somebody cancelled it, another worker has it, or this process is asked to end. A handler
lets these through; what it has done stays done, for every step may run twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import update

from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.custody_tables import Operation
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext

# A handler may say more often how far it is than anybody looks.
WRITTEN_EVERY_SECONDS = 1.0


class HandlerStopped(Exception):  # noqa: N818 (as HandlerError is what its children are not: errors)
    """The handler must end now. It is no failure."""


class OperationCancelled(HandlerStopped):
    """Somebody has cancelled it."""


class LeaseLost(HandlerStopped):
    """It took longer than its lease without a word, and another worker has it now."""


class ProcessEnds(HandlerStopped):
    """This process was asked to end. Another one goes on."""


@dataclass
class OperationRun:
    """`arguments` are those it was started with; `actor` is who started it, for the events that the handler writes.
    `said` is how far it is."""

    context: ServiceContext = field(repr=False)
    id: str
    kind: str
    project_id: str | None
    run_id: str | None
    checkpoint_id: str | None
    arguments: dict[str, Any]
    actor: Actor
    lease_token: str
    tries: int
    said: dict[str, Any] = field(default_factory=dict)
    _written_at: float = float("-inf")

    def progress(self, *, done: int | None = None, total: int | None = None, note: str | None = None) -> None:
        """What is left out stays as it was said before. Raises HandlerStopped. Call it outside of transactions."""
        said = {"done": done, "total": total, "note": note}
        self.said |= {name: value for name, value in said.items() if value is not None}
        if self.context.stopping.is_set():
            raise ProcessEnds
        if time.monotonic() - self._written_at < WRITTEN_EVERY_SECONDS:
            return
        with self.context.database.transaction() as session:
            lease = timedelta(seconds=self.context.settings.lease_seconds)
            row = session.execute(
                update(Operation)
                .where(Operation.id == self.id, Operation.lease_token == self.lease_token)
                .values(progress=self.said, leased_until=database_now(session) + lease)
                .returning(Operation.cancel_requested_at),
                execution_options={"synchronize_session": False},
            ).one_or_none()
        self._written_at = time.monotonic()
        if row is None:
            raise LeaseLost
        if row.cancel_requested_at is not None:
            raise OperationCancelled


Handler = Callable[[ServiceContext, OperationRun], dict[str, Any]]
"""Carries out one kind of operation, and returns what came of it as JSON values. See `operation_kinds`."""
