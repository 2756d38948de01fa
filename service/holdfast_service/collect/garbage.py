"""Which copies may go (protocol rules 24 and 25). Asked twice: to find candidates, and again under the chunk's lock.

A copy may go when no PUT into it can land any more, no upload relies on it, and either nothing refers to its chunk or
another copy of the chunk serves everybody.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, exists, or_
from sqlalchemy.orm import aliased

from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.catalog.copies import PROVEN
from holdfast_service.catalog.tables import Checkpoint, ChunkListEntry, Copy, Shard, ShardChunk

# What is in the trash can come back, so its chunks stay.
LIVE = (CheckpointState.UPLOADING, CheckpointState.COMMITTED, CheckpointState.TRASHED)
_COLLECTABLE = (CopyState.PENDING, CopyState.VERIFIED, CopyState.SUSPECT, CopyState.BAD)


def may_go(store_id: int, now: datetime, longest_upload: timedelta) -> ColumnElement[bool]:
    """Over `copies`. A late PUT lands after an abort, so a copy waits out its last ticket and the longest upload."""
    return and_(
        Copy.store_id == store_id,
        Copy.state.in_(_COLLECTABLE),
        Copy.ticket_expires_at < now - longest_upload,
        ~_relied_on_by_an_upload(),
        or_(~_chunk_is_needed(), Copy.state == CopyState.PENDING, _another_serves_everybody()),
    )


def _relied_on_by_an_upload() -> ColumnElement[bool]:
    return exists().where(
        ShardChunk.copy_id == Copy.id,
        ShardChunk.shard_id == Shard.id,
        Shard.checkpoint_id == Checkpoint.id,
        Checkpoint.state == CheckpointState.UPLOADING,
    )


def _chunk_is_needed() -> ColumnElement[bool]:
    return exists().where(
        ChunkListEntry.chunk_id == Copy.chunk_id,
        ChunkListEntry.chunk_list_id == Shard.chunk_list_id,
        Shard.checkpoint_id == Checkpoint.id,
        Checkpoint.state.in_(LIVE),
    )


def _another_serves_everybody() -> ColumnElement[bool]:
    """The oldest verified copy that is proven stays; an unproven one goes only beside it. A suspect one is looked at
    first."""
    other = aliased(Copy)
    return and_(
        Copy.state.in_((CopyState.VERIFIED, CopyState.BAD)),
        exists().where(
            other.chunk_id == Copy.chunk_id,
            other.store_id == Copy.store_id,
            other.id != Copy.id,
            other.state == CopyState.VERIFIED,
            other.proof.in_(PROVEN),
            or_(
                Copy.state != CopyState.VERIFIED,
                Copy.proof.not_in(PROVEN),
                other.id < Copy.id,
            ),
        ),
    )
