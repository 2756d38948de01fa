"""What a committed checkpoint consists of: its shards, and the chunks of one shard in their order."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import ChunkRef, Manifest, ShardChunks, ShardView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import ShardState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.readable import refuse_unless_whole
from holdfast_service.catalog.resolve import checkpoint_by_id
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkListEntry, Shard
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def read_manifest(context: ServiceContext, caller: Principal, checkpoint_id: str) -> Manifest:
    """Raises `checkpoint_not_found`, and what refuse_unless_whole raises."""
    with context.database.read() as session:
        project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        return Manifest(
            checkpoint=current_checkpoint_view(session, project.name, run.name, checkpoint),
            layout_digest=_layout_digest(session, checkpoint),
            shards=_shard_views(session, checkpoint),
        )


def read_shard_chunks(context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int) -> ShardChunks:
    """Raises `checkpoint_not_found`, `invalid_request` for a rank beyond the world, and as read_manifest."""
    with context.database.read() as session:
        _, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        shard = session.scalar(select(Shard).where(Shard.checkpoint_id == checkpoint_id, Shard.rank == rank))
        if shard is None:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                f"There is no rank {rank} in a world of {checkpoint.world_size}. Correct the rank.",
                rank=rank,
                world_size=checkpoint.world_size,
            )
        rows = session.execute(
            select(Chunk.digest, Chunk.bytes)
            .join(ChunkListEntry, ChunkListEntry.chunk_id == Chunk.id)
            .where(ChunkListEntry.chunk_list_id == shard.chunk_list_id)
            .order_by(ChunkListEntry.ordinal)
        )
        chunks = [ChunkRef(digest=digest, bytes=size) for digest, size in rows]
        assert shard.digest is not None  # sealed, since the checkpoint is whole
        return ShardChunks(rank=rank, digest=shard.digest, chunks=chunks)


def _layout_digest(session: Session, checkpoint: Checkpoint) -> str:
    """The layout is a chunk of the first rank that has one: rank 0's."""
    return session.execute(
        select(Chunk.digest)
        .join(ChunkListEntry, ChunkListEntry.chunk_id == Chunk.id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint.id, ChunkListEntry.ordinal == Shard.layout_ordinal)
        .order_by(Shard.rank)
        .limit(1)
    ).scalar_one()


def _shard_views(session: Session, checkpoint: Checkpoint) -> list[ShardView]:
    of_checkpoint = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint.id)
    counts = (
        select(ChunkListEntry.chunk_list_id, func.count())
        .where(ChunkListEntry.chunk_list_id.in_(of_checkpoint))
        .group_by(ChunkListEntry.chunk_list_id)
    )
    chunk_counts = dict(session.execute(counts).all())
    rows = session.execute(
        select(Shard, Chunk.digest)
        .join(
            ChunkListEntry,
            (ChunkListEntry.chunk_list_id == Shard.chunk_list_id) & (ChunkListEntry.ordinal == Shard.index_ordinal),
        )
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(Shard.checkpoint_id == checkpoint.id)
        .order_by(Shard.rank)
    )
    return [
        ShardView(
            rank=shard.rank,
            state=ShardState(shard.state),
            digest=shard.digest,
            chunk_count=0 if shard.chunk_list_id is None else chunk_counts.get(shard.chunk_list_id, 0),
            logical_bytes=shard.logical_bytes,
            index_digest=index_digest,
            finite=shard.finite,
        )
        for shard, index_digest in rows
    ]
