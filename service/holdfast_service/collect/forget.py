"""Drops rows of the past, a portion at a time: without it a chunk would leave its row for ever.

    references of uploads that are over -> chunk lists that no shard has -> copies that are gone -> chunks without any

Foreign keys hold the order, and each step may be cut short: the next round goes on.
"""

from __future__ import annotations

from sqlalchemy import delete, exists, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkList, ChunkListEntry, Copy, Shard, ShardChunk
from holdfast_service.context import ServiceContext

_ROWS = 2000
_OVER = (CheckpointState.ABORTED, CheckpointState.DELETED)
_UNSYNCHRONIZED = {"synchronize_session": False}


def forget(context: ServiceContext) -> int:
    """How many chunks were dropped."""
    with context.database.transaction() as session:
        _references_of_past_uploads(session)
    with context.database.transaction() as session:
        _unused_lists(session)
    with context.database.transaction() as session:
        _gone_copies(session)
    with context.database.transaction() as session:
        return _bare_chunks(session)


def _references_of_past_uploads(session: Session) -> None:
    over = select(Shard.id).join(Checkpoint, Checkpoint.id == Shard.checkpoint_id).where(Checkpoint.state.in_(_OVER))
    used = exists().where(ShardChunk.shard_id == Shard.id)
    for shard_id in session.scalars(over.where(used).limit(_ROWS)).all():
        session.execute(delete(ShardChunk).where(ShardChunk.shard_id == shard_id), execution_options=_UNSYNCHRONIZED)
    listed = session.scalars(over.where(Shard.chunk_list_id.is_not(None)).limit(_ROWS)).all()
    session.execute(
        update(Shard).where(Shard.id.in_(listed)).values(chunk_list_id=None), execution_options=_UNSYNCHRONIZED
    )


def _unused_lists(session: Session) -> None:
    unused = ~exists().where(Shard.chunk_list_id == ChunkList.id)
    found = session.scalars(select(ChunkList.id).where(unused).limit(_ROWS)).all()
    locked = session.scalars(
        select(ChunkList.id).where(ChunkList.id.in_(found)).with_for_update(skip_locked=True)
    ).all()
    # Again, behind the lock: a seal takes the row FOR KEY SHARE before its shard refers to it.
    still = session.scalars(select(ChunkList.id).where(ChunkList.id.in_(locked), unused)).all()
    session.execute(
        delete(ChunkListEntry).where(ChunkListEntry.chunk_list_id.in_(still)), execution_options=_UNSYNCHRONIZED
    )
    session.execute(delete(ChunkList).where(ChunkList.id.in_(still)), execution_options=_UNSYNCHRONIZED)


def _gone_copies(session: Session) -> None:
    referred_to = exists().where(ShardChunk.copy_id == Copy.id)
    found = session.scalars(select(Copy.id).where(Copy.state == CopyState.GONE, ~referred_to).limit(_ROWS)).all()
    session.execute(delete(Copy).where(Copy.id.in_(found)), execution_options=_UNSYNCHRONIZED)


def _bare_chunks(session: Session) -> int:
    bare = ~(
        exists().where(Copy.chunk_id == Chunk.id)
        | exists().where(ShardChunk.chunk_id == Chunk.id)
        | exists().where(ChunkListEntry.chunk_id == Chunk.id)
    )
    found = session.scalars(select(Chunk.id).where(bare).limit(_ROWS)).all()
    locked = session.scalars(
        select(Chunk.id).where(Chunk.id.in_(found)).order_by(Chunk.digest).with_for_update(skip_locked=True)
    ).all()
    # Again, behind the lock: a negotiation takes the row FOR KEY SHARE before it refers to it.
    still = session.scalars(select(Chunk.id).where(Chunk.id.in_(locked), bare)).all()
    session.execute(delete(Chunk).where(Chunk.id.in_(still)), execution_options=_UNSYNCHRONIZED)
    return len(still)
