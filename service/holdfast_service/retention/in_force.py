"""What keeps a checkpoint where it is, as conditions of a query; asked anew under the checkpoint's lock, in a later
statement than the one that took it."""

from __future__ import annotations

from sqlalchemy import ColumnElement, exists, or_
from sqlalchemy.orm import Session

from holdfast_service.catalog.held import is_held
from holdfast_service.catalog.pinned import pin_in_force
from holdfast_service.catalog.tables import Checkpoint, ReadLease
from holdfast_service.clock import database_now


def is_pinned(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: a pin whose end has not come by the database's clock."""
    return pin_in_force(database_now(session))


def is_being_read(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: a lease that has not run out. It outlives every ticket given under it (protocol rule 21)."""
    return exists().where(ReadLease.checkpoint_id == Checkpoint.id, ReadLease.expires_at > database_now(session))


def must_stay(session: Session) -> ColumnElement[bool]:
    """Over `checkpoints`: somebody holds, has pinned or reads it."""
    return or_(is_held(session), is_pinned(session), is_being_read(session))
