"""Which checkpoints a hold keeps: whoever takes bytes or a checkpoint away asks here first (protocol rule 29)."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session

from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.clock import database_now


def is_held(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: a hold that is not released, and not over by the database's clock at this moment."""
    return exists().where(Hold.checkpoint_id == Checkpoint.id, _in_force(session))


def hold_reasons(session: Session, checkpoint_ids: Collection[str]) -> dict[str, list[str]]:
    """By id, why each is held; those that are not are left out."""
    reasons: dict[str, list[str]] = {}
    rows = session.execute(
        select(Hold.checkpoint_id, Hold.kind, Hold.reason)
        .where(Hold.checkpoint_id.in_(checkpoint_ids), _in_force(session))
        .order_by(Hold.placed_at, Hold.id)
    )
    for checkpoint_id, kind, reason in rows:
        reasons.setdefault(checkpoint_id, []).append(f"{kind}: {reason}")
    return reasons


def _in_force(session: Session) -> ColumnElement[bool]:
    return Hold.released_at.is_(None) & or_(Hold.retain_until.is_(None), Hold.retain_until > database_now(session))
