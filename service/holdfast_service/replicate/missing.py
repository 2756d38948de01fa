"""What is due, and which chunks of a checkpoint a store lacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import Select, exists, func, or_, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointState, CopyState, Health
from holdfast_service.catalog.copies import is_in
from holdfast_service.catalog.custody_tables import TO_COPY, CheckpointCopy
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkListEntry, Copy, Shard


def due(store_id: int, now: datetime) -> Select[CheckpointCopy, Checkpoint]:
    """Newest commit first, so that what would be lost shrinks fastest. A corrupt one has nothing to copy from."""
    return (
        select(CheckpointCopy, Checkpoint)
        .join(Checkpoint, Checkpoint.id == CheckpointCopy.checkpoint_id)
        .where(
            CheckpointCopy.store_id == store_id,
            text(f"({TO_COPY})"),
            or_(CheckpointCopy.retry_at.is_(None), CheckpointCopy.retry_at <= now),
            Checkpoint.state == CheckpointState.COMMITTED,
            Checkpoint.health != Health.CORRUPT,
        )
        .order_by(Checkpoint.committed_at.desc(), Checkpoint.id)
    )


def chunks_to_take(
    session: Session, checkpoint_id: str, store_id: int, now: datetime, *, passed: Collection[int], most: int
) -> Sequence[int]:
    """Ids of chunks that the store lacks and nobody is copying there, by digest; not those in `passed`."""
    taken = aliased(Copy)
    at_work = exists().where(
        taken.chunk_id == Chunk.id,
        taken.store_id == store_id,
        taken.state == CopyState.COPYING,
        taken.leased_until > now,
    )
    return session.scalars(
        _lacking(checkpoint_id, store_id)
        .with_only_columns(Chunk.id)
        .where(~at_work, Chunk.id.not_in(passed))
        .order_by(Chunk.digest)
        .limit(most)
    ).all()


def missing_bytes(session: Session, checkpoint_id: str, store_id: int) -> tuple[int, int]:
    """How many distinct chunks of the checkpoint the store lacks, and their bytes."""
    lacking = _lacking(checkpoint_id, store_id).with_only_columns(Chunk.id, Chunk.bytes).subquery()
    count, size = session.execute(select(func.count(), func.sum(lacking.c.bytes)).select_from(lacking)).one()
    return int(count), int(size or 0)


def _lacking(checkpoint_id: str, store_id: int) -> Select[int]:
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
    needed = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    return select(Chunk.id).where(Chunk.id.in_(needed), ~is_in(store_id, Chunk.id))
