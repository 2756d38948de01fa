"""Which copies of a chunk can be relied on, and by whom (protocol rules 14 and 15)."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, or_
from sqlalchemy.orm import InstrumentedAttribute, aliased

from holdfast_protocol.states import CopyState, Proof
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.catalog.tables import Copy
from holdfast_service.stores.base import ObjectKey

PROVEN = (Proof.STORE_SHA256, Proof.READ)
KEPT = (CopyState.VERIFIED, CopyState.COLD, CopyState.THAWING)


def usable_by(copy: Copy, attempt_id: int) -> bool:
    """Verified, and either proven to hold the chunk's bytes or uploaded by this very attempt.

    A copy whose bytes nobody but its client has hashed is good for its own attempt: what that client mixed up can
    spoil its own checkpoint, and never another's.
    """
    return copy.state == CopyState.VERIFIED and (copy.proof in PROVEN or copy.attempt_id == attempt_id)


def is_usable_by(store_id: int, attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """The same for a query over `copies`, in the one store that is asked about."""
    return and_(
        Copy.store_id == store_id,
        Copy.state == CopyState.VERIFIED,
        or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id),
    )


def keeps_whole(store_ids: Collection[int], attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """Whether a copy keeps its chunk readable from these stores: it is good, though it may have to be thawed first."""
    return and_(Copy.store_id.in_(store_ids), keeps_anywhere(attempt_id))


def keeps_anywhere(attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """The same in any store of the catalog: what this process has not attached is not lost."""
    return and_(Copy.state.in_(KEPT), or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id))


def may_keep(attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """Nobody has found this copy bad, in whatever store it is: while there is one, its chunk is not said to be lost.
    What is suspect was not read yet, and may be good."""
    return and_(Copy.state.in_((*KEPT, CopyState.SUSPECT)), or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id))


def is_readable(
    store_ids: Collection[int],
    attempt_id: int | InstrumentedAttribute[int],
    *,
    until: datetime | None = None,
    copy: type[Copy] = Copy,
) -> ColumnElement[bool]:
    """Over `copies`: a reader of this attempt's checkpoints can read it now, from one of these stores. What is thawed
    counts where it stays so `until` then; without a moment only what needs no thaw does.

    A thawed copy stays cold in name, for nobody but a reader may rely on it. A suspect one in an archive is no more
    readable than a cold one."""
    at_once = or_(copy.storage_class.is_(None), copy.storage_class.not_in(ARCHIVED))
    there = or_(copy.state == CopyState.VERIFIED, and_(copy.state == CopyState.SUSPECT, at_once))
    if until is not None:
        thawed = copy.state.in_((CopyState.COLD, CopyState.SUSPECT))
        there = or_(there, and_(thawed, copy.readable_until >= until))
    return and_(copy.store_id.in_(store_ids), there, or_(copy.proof.in_(PROVEN), copy.attempt_id == attempt_id))


def is_in(store_id: int, chunk_id: InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """Whether a store holds a copy of the chunk that is good for everybody, though it may have to be thawed first."""
    kept = aliased(Copy)
    return exists().where(
        kept.chunk_id == chunk_id, kept.store_id == store_id, kept.state.in_(KEPT), kept.proof.in_(PROVEN)
    )


def object_key(project_id: str, digest: str, copy: Copy) -> ObjectKey:
    """Where a ticket could overwrite the object, its version is named where the store has versions (protocol rule 37).
    Elsewhere not: to read a version takes a permission of its own."""
    return ObjectKey(
        project_id, digest, copy.generation, copy.version_id if copy.overwritable_until is not None else None
    )


def stays_as_read(copy: Copy, now: datetime) -> bool:
    """Whether what is read from now on is what stays: no ticket can overwrite it any more, or its version is named."""
    return copy.overwritable_until is None or copy.version_id is not None or copy.overwritable_until <= now
