"""A chunk's copies as the wire shows them, and what counts as bad or as kept."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, or_, select
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.scrub import CopyView
from holdfast_protocol.states import CopyState, Proof
from holdfast_service.catalog.copies import KEPT
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.context import ServiceContext


def is_bad() -> ColumnElement[bool]:
    """Over `copies`: suspect, or found bad and not healed. An upload that never arrived as announced is neither."""
    return or_(
        Copy.state == CopyState.SUSPECT,
        and_(Copy.state == CopyState.BAD, Copy.bad_at.is_not(None), Copy.healed_at.is_(None)),
    )


def is_kept(store_ids: Collection[int]) -> ColumnElement[bool]:
    """Over `chunks`: an attached store has a copy that is not known to be bad."""
    kept = aliased(Copy)
    return exists().where(kept.chunk_id == Chunk.id, kept.store_id.in_(store_ids), kept.state.in_(KEPT))


def view_of(context: ServiceContext, copy: Copy) -> CopyView:
    return CopyView(**copy_fields(context, copy))


def copy_fields(context: ServiceContext, copy: Copy) -> dict[str, Any]:
    role = next((attached.role for attached in context.stores if attached.store_id == copy.store_id), None)
    return {
        "store": role,
        "state": CopyState(copy.state),
        "proof": None if copy.proof is None else Proof(copy.proof),
        "codec": copy.codec,
        "stored_bytes": copy.stored_bytes,
        "storage_class": copy.storage_class,
        "verified_at": copy.verified_at,
        "bad_at": copy.bad_at,
        "finding": copy.finding,
        "healed_at": copy.healed_at,
    }


def copies_by_chunk(session: Session, context: ServiceContext, chunk_ids: Collection[int]) -> dict[int, list[CopyView]]:
    """What is gone is left out."""
    found: dict[int, list[CopyView]] = {chunk_id: [] for chunk_id in chunk_ids}
    for copy in session.scalars(
        select(Copy).where(Copy.chunk_id.in_(chunk_ids), Copy.state != CopyState.GONE).order_by(Copy.id)
    ):
        found[copy.chunk_id].append(view_of(context, copy))
    return found
