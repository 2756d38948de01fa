"""Which checkpoints are pinned now: a pin whose end has not come by the database's clock."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, or_

from holdfast_service.catalog.tables import Checkpoint


def pin_in_force(now: datetime, checkpoint: type[Checkpoint] = Checkpoint) -> ColumnElement[bool]:
    """Over `checkpoints`. `now` is the database's."""
    return checkpoint.pinned_at.is_not(None) & or_(checkpoint.pinned_until.is_(None), checkpoint.pinned_until > now)
