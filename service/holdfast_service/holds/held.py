"""What keeps a checkpoint from being taken away: ask here before bytes or a checkpoint go (rule holds-outrank).

Ask under the checkpoint's lock, in a later statement than the lock's: a hold is placed under the same lock. A
chunk is kept by what uses it: a held checkpoint is committed or in the trash, and its chunks are needed, whatever else
shares them.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session

from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import Hold


def pin_in_force(now: datetime, checkpoint: type[Checkpoint] = Checkpoint) -> ColumnElement[bool]:
    """Over `checkpoints`: a pin whose end has not come. `now` is the database's."""
    return checkpoint.pinned_at.is_not(None) & or_(checkpoint.pinned_until.is_(None), checkpoint.pinned_until > now)


class CopyLock(StrEnum):
    """What the store was told about a copy (Object Lock); null: nothing. Whatever is not null may be locked."""

    CHANGING = "changing"
    """The store is being told, either way: after a crash the answer is unknown."""
    LOCKED = "locked"


def is_held(session: Session, checkpoint: type[Checkpoint] = Checkpoint) -> ColumnElement[bool]:
    """Over `checkpoints`: a hold that is not released, and not over by the database's clock at this moment."""
    return exists().where(Hold.checkpoint_id == checkpoint.id, in_force(database_now(session)))


def hold_reasons(session: Session, checkpoint_ids: Collection[str]) -> dict[str, list[str]]:
    """By id, who holds each, until when and why, the oldest hold first; those that are not held are left out."""
    reasons: dict[str, list[str]] = {}
    rows = session.execute(
        select(Hold.checkpoint_id, Hold.placed_by, Hold.retain_until, Hold.reason)
        .where(Hold.checkpoint_id.in_(checkpoint_ids), in_force(database_now(session)))
        .order_by(Hold.placed_at, Hold.id)
    )
    for checkpoint_id, placed_by, until, reason in rows:
        end = "until it is released" if until is None else f"until {until:%Y-%m-%d %H:%M} UTC"
        reasons.setdefault(checkpoint_id, []).append(f"by {placed_by} {end}: {reason}")
    return reasons


def in_force(now: datetime) -> ColumnElement[bool]:
    """Over `holds`. `now` is the database's."""
    return Hold.released_at.is_(None) & or_(Hold.retain_until.is_(None), Hold.retain_until > now)


def store_lets_go() -> ColumnElement[bool]:
    """Over `copies`: the store was told of no hold. What may be locked is not taken away before it is unlocked."""
    return Copy.lock.is_(None)
