"""Which checkpoints a hold keeps: whoever takes bytes or a checkpoint away asks here first (protocol rule 29).

Ask under the checkpoint's lock, in a later statement than the one that took it: a hold is placed under the same lock.
A chunk is kept by what uses it: a held checkpoint is committed or in the trash, so its chunks are needed, whoever else
shares them.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.catalog.tables import Checkpoint, Copy
from holdfast_service.clock import database_now
from holdfast_service.errors import ProblemError


class CopyLock(StrEnum):
    """What the store was told about a copy (Object Lock); null: nothing. Whatever is not null may be locked."""

    CHANGING = "changing"
    """It is being told, either way: after a crash nobody knows which."""
    LOCKED = "locked"


def is_held(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: a hold that is not released, and not over by the database's clock at this moment."""
    return exists().where(Hold.checkpoint_id == Checkpoint.id, in_force(database_now(session)))


def hold_reasons(session: Session, checkpoint_ids: Collection[str]) -> dict[str, list[str]]:
    """By id, why each is held; those that are not are left out."""
    return {
        checkpoint_id: [f"{hold.kind}: {hold.reason}" for hold in holds]
        for checkpoint_id, holds in holds_in_force(session, checkpoint_ids).items()
    }


def holds_in_force(session: Session, checkpoint_ids: Collection[str]) -> dict[str, list[Hold]]:
    """By id of the checkpoint, the oldest first; those without any are left out."""
    found: dict[str, list[Hold]] = {}
    for hold in session.scalars(
        select(Hold)
        .where(Hold.checkpoint_id.in_(checkpoint_ids), in_force(database_now(session)))
        .order_by(Hold.placed_at, Hold.id),
        execution_options={"populate_existing": True},
    ):
        found.setdefault(hold.checkpoint_id, []).append(hold)
    return found


def refuse_held(session: Session, checkpoint: Checkpoint) -> None:
    """Raises `checkpoint_held` with who placed each hold, why, and until when."""
    holds = holds_in_force(session, [checkpoint.id]).get(checkpoint.id)
    if not holds:
        return
    said = "; ".join(
        f"by {hold.placed_by} {'until it is released' if hold.retain_until is None else _until(hold.retain_until)} "
        f"({hold.reason})"
        for hold in holds
    )
    raise ProblemError(
        ProblemCode.CHECKPOINT_HELD,
        f"Step {checkpoint.step} is held {said}, and nobody can take it away meanwhile. `holdfast hold list` shows the "
        "holds; an administrator who has not placed one can release it.",
        checkpoint_id=checkpoint.id,
        holds=[
            {
                "id": hold.id,
                "kind": hold.kind,
                "reason": hold.reason,
                "placed_by": hold.placed_by,
                "retain_until": None if hold.retain_until is None else hold.retain_until.isoformat(),
            }
            for hold in holds
        ],
    )


def in_force(now: datetime) -> ColumnElement[bool]:
    """Over `holds`. `now` is the database's."""
    return Hold.released_at.is_(None) & or_(Hold.retain_until.is_(None), Hold.retain_until > now)


def store_lets_go() -> ColumnElement[bool]:
    """Over `copies`: the store was told of no hold. What may be locked is not taken away before it is unlocked."""
    return Copy.lock.is_(None)


def _until(moment: datetime) -> str:
    return f"until {moment:%Y-%m-%d %H:%M} UTC"
