"""Which components a run declares: those of its first checkpoint that was ever committed, whatever became of it since.

Opening an attempt tells them to the trainer, and the commit compares with them.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_service.catalog.tables import Checkpoint


def first_components(session: Session, run_id: str) -> list[str]:
    """By name; none while nothing is committed."""
    components = session.scalar(
        select(Checkpoint.components)
        .where(Checkpoint.run_id == run_id, Checkpoint.committed_at.is_not(None))
        .order_by(Checkpoint.step, Checkpoint.id)
        .limit(1)
    )
    return sorted(components or {})
