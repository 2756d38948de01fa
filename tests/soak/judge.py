"""The end of a soak: what must hold when everything is quiet."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import select

from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_protocol.states import Health
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Checkpoint
from tests.soak.compare import DifferentError, compare
from tests.soak.ledger import Ledger
from tests.soak.quiet import KEPT, Quiet
from tests.support.tallies import drifted_at_last


class Judge:
    """`context` is a service's of its own, on the same catalog and stores; it runs no controllers."""

    def __init__(self, client: Client, context: ServiceContext, ledger: Ledger) -> None:
        self._client = client
        self._context = context
        self._ledger = ledger
        self.facts: Counter[str] = Counter()
        self._quiet = Quiet(client, context, self.facts)
        self.notes: list[str] = []
        """What went wrong on the way and was fixed by another try."""

    def wait_until_quiet(self, retry_deadline_seconds: float) -> list[str]:
        return self._quiet.wait(retry_deadline_seconds)

    def faults(self) -> list[str]:
        """Every sentence is a reason why the soak has failed."""
        for controller in self._client.controllers.list():
            self.facts[f"controller {controller.name}: done"] = controller.done
            self.facts[f"controller {controller.name}: failed, and tried again"] = controller.failed
            if controller.error is not None:
                self.notes.append(f"the last failure of {controller.name}: {controller.error}")
        return [*self._unreadable(), *self._quiet.leaked(), *self._quiet.swept(), *drifted_at_last(self._context)]

    def _unreadable(self) -> list[str]:
        with self._context.database.read() as session:
            rows = session.execute(
                select(Checkpoint.id, Checkpoint.state, Checkpoint.health).where(Checkpoint.state.in_(KEPT))
            ).all()
        found = []
        for row in rows:
            self.facts[f"{row.state} at the end"] += 1
            if row.health == Health.CORRUPT:
                found.append(f"the checkpoint {row.id} is marked corrupt")
            try:
                self.facts["bytes compared at the end"] += compare(self._client, row.id, self._ledger)
            except (HoldfastError, DifferentError) as error:
                found.append(f"the {row.state} checkpoint {row.id} cannot be read: {type(error).__name__}: {error}")
        return found
