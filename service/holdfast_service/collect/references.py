"""Drops what checkpoints refer to that are over: aborted, or deleted with their record gone (rule record-outbox).

    references of an upload -> the shard's list -> lists that no shard has

The chunks are left as candidates in the very transaction that drops the last reference: a crash leaks nothing. Each
step may be cut short, and the next pass goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import delete, exists, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import leave_selected
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import TO_FORGET, Checkpoint, ChunkList, ChunkListEntry, Shard, ShardChunk
from holdfast_service.holds.held import is_held

_CHECKPOINTS = 200
_SHARDS = 50
_LISTS = 500
_UNSYNCHRONIZED = {"synchronize_session": False}


def drop_past_references(context: ServiceContext) -> None:
    """Drops the references of at most _CHECKPOINTS checkpoints."""
    with context.database.read() as session:
        # The text of the partial index, so that it is used.
        over = session.scalars(select(Checkpoint.id).where(text(TO_FORGET)).order_by(Checkpoint.id).limit(_CHECKPOINTS))
        ids = list(over)
    for checkpoint_id in ids:
        while released := context.database.run(partial(_drop, checkpoint_id=checkpoint_id)):
            drop_unused_lists(context, released)


def _drop(session: Session, checkpoint_id: str) -> list[int]:
    """The lists that some of its shards had; none once the checkpoint has nothing left."""
    checkpoint = session.scalars(
        select(Checkpoint)
        .where(Checkpoint.id == checkpoint_id, text(TO_FORGET), ~is_held(session))
        .with_for_update(skip_locked=True)
    ).one_or_none()
    if checkpoint is None:
        return []
    shards = session.execute(
        select(Shard.id, Shard.chunk_list_id)
        .where(
            Shard.checkpoint_id == checkpoint_id,
            or_(Shard.chunk_list_id.is_not(None), exists().where(ShardChunk.shard_id == Shard.id)),
        )
        .order_by(Shard.id)
        .limit(_SHARDS)
        .with_for_update()
    ).all()
    shard_ids = [row.id for row in shards]
    lists = sorted({row.chunk_list_id for row in shards if row.chunk_list_id is not None})
    if shard_ids:
        leave_selected(session, select(ShardChunk.chunk_id).where(ShardChunk.shard_id.in_(shard_ids)))
        leave_selected(session, select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists)))
        session.execute(delete(ShardChunk).where(ShardChunk.shard_id.in_(shard_ids)), execution_options=_UNSYNCHRONIZED)
        session.execute(
            update(Shard).where(Shard.id.in_(shard_ids)).values(chunk_list_id=None), execution_options=_UNSYNCHRONIZED
        )
    if len(shards) < _SHARDS:
        checkpoint.forgotten_at = database_now(session)
    return lists


def drop_unused_lists(context: ServiceContext, list_ids: Sequence[int]) -> None:
    """Those of these lists that no shard has. In later transactions than the one that released them: if two
    transactions release a shared list at once, the last one then sees that no shard has it."""
    for first in range(0, len(list_ids), _LISTS):
        portion = list_ids[first : first + _LISTS]
        context.database.run(partial(_drop_lists, list_ids=portion))


def _drop_lists(session: Session, list_ids: Sequence[int]) -> None:
    locked = session.scalars(
        select(ChunkList.id).where(ChunkList.id.in_(list_ids)).order_by(ChunkList.id).with_for_update(skip_locked=True)
    ).all()
    unused = ~exists().where(Shard.chunk_list_id == ChunkList.id)
    # A later statement, behind the lock: a seal takes the row FOR KEY SHARE before its shard refers to it.
    still = session.scalars(select(ChunkList.id).where(ChunkList.id.in_(locked), unused)).all()
    if not still:
        return
    leave_selected(session, select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(still)))
    session.execute(
        delete(ChunkListEntry).where(ChunkListEntry.chunk_list_id.in_(still)), execution_options=_UNSYNCHRONIZED
    )
    session.execute(delete(ChunkList).where(ChunkList.id.in_(still)), execution_options=_UNSYNCHRONIZED)
