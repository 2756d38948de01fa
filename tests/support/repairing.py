"""What repairing does to a chunk and to the checkpoints that need it, as its tests look at it."""

from __future__ import annotations

from sqlalchemy import select

from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.db.tables.operations import AuditEvent
from tests.support.service import RunningService

DAY = 86400
CONTENT = b"weights of rank 0" * 1000


def health_of(service: RunningService, checkpoint_id: str) -> tuple[str, str | None]:
    """Its health, and why."""
    with service.context.database.read() as session:
        row = session.get_one(Checkpoint, checkpoint_id)
        return row.health, row.health_reason


def actions(service: RunningService) -> list[str]:
    """Of repairing only, the oldest first."""
    repaired = select(AuditEvent.action).where(AuditEvent.actor == "repair").order_by(AuditEvent.id)
    with service.context.database.read() as session:
        return list(session.scalars(repaired))
