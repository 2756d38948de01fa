"""Which copies the store is to hold, and which it holds for nobody any more (protocol rule 29). Queries only.

What counts is the union over the checkpoints that share a chunk.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import ColumnElement, and_, or_, select, text

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.copies import KEPT
from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.catalog.held import CopyLock, in_force
from holdfast_service.catalog.tables import COPY_LOCKED, ChunkListEntry, Copy, Shard

_WORTH_LOCKING = (*KEPT, CopyState.SUSPECT)


def mirrored(now: datetime) -> ColumnElement[bool]:
    """Over `holds`: in force, and wanted in the store as well."""
    return and_(Hold.mirror, in_force(now))


def to_lock(store_ids: Collection[int], now: datetime) -> ColumnElement[bool]:
    """Over `copies`; a new copy of a held chunk is among them (healed, or in a second store)."""
    return and_(
        worth_locking(store_ids),
        or_(Copy.lock.is_(None), Copy.lock != CopyLock.LOCKED),
        _needed(now),
        _free(now),
    )


def to_unlock(store_ids: Collection[int], now: datetime) -> ColumnElement[bool]:
    """Over `copies`, in whatever state: nothing that is locked can be deleted."""
    # The text of the partial index, so that it is used.
    return and_(
        text(COPY_LOCKED), Copy.store_id.in_(store_ids), Copy.state != CopyState.GONE, ~_needed(now), _free(now)
    )


def worth_locking(store_ids: Collection[int]) -> ColumnElement[bool]:
    """Over `copies`: there, and not known to be bad."""
    return and_(Copy.store_id.in_(store_ids), Copy.state.in_(_WORTH_LOCKING))


def is_chunk_of(hold_id: str) -> ColumnElement[bool]:
    """Over `copies`: of a chunk that the held checkpoint needs."""
    return Copy.chunk_id.in_(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(Hold, Hold.checkpoint_id == Shard.checkpoint_id)
        .where(Hold.id == hold_id)
    )


def _needed(now: datetime) -> ColumnElement[bool]:
    return Copy.chunk_id.in_(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(Hold, Hold.checkpoint_id == Shard.checkpoint_id)
        .where(mirrored(now))
    )


def _free(now: datetime) -> ColumnElement[bool]:
    return or_(Copy.leased_until.is_(None), Copy.leased_until <= now)
