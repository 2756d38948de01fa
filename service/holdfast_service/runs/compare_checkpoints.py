"""Two checkpoints side by side, of one run, of two, or of two projects: what the catalog knows of them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, func, intersect, select
from sqlalchemy.orm import Session

from holdfast_protocol.attempts import (
    MOST_DIFFERENCES,
    CheckpointDiff,
    ComponentPair,
    MetricPair,
    config_differences,
)
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Attempt, Chunk, ChunkListEntry, Shard
from holdfast_service.runs.views import checkpoint_by_id, current_checkpoint_view, refuse_unless_whole


def compare_checkpoints(
    context: ServiceContext, caller: Principal, checkpoint_id: str, *, against: str
) -> CheckpointDiff:
    """`against` is the one before. Raises `checkpoint_not_found` for either, and what refuse_unless_whole raises."""
    with context.database.read() as session:
        before, config_before = _found(session, caller, against)
        after, config_after = _found(session, caller, checkpoint_id)
        shared_chunks, shared_bytes = _shared(session, against, checkpoint_id)
    known = config_before is not None and config_after is not None
    found = config_differences(config_before or {}, config_after or {}) if known else []
    return CheckpointDiff(
        before=before,
        after=after,
        config=found[:MOST_DIFFERENCES] if known else None,
        config_left_out=max(len(found) - MOST_DIFFERENCES, 0),
        metrics=[
            MetricPair(name=name, before=before.metrics.get(name), after=after.metrics.get(name))
            for name in sorted(before.metrics.keys() | after.metrics.keys())
        ],
        components=[
            ComponentPair(name=name, before=before.components.get(name), after=after.components.get(name))
            for name in sorted(before.components.keys() | after.components.keys())
        ],
        shared_chunks=shared_chunks,
        shared_bytes=shared_bytes,
    )


def _found(session: Session, caller: Principal, checkpoint_id: str) -> tuple[CheckpointView, dict[str, Any] | None]:
    project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
    refuse_unless_whole(checkpoint)
    config = session.scalar(select(Attempt.config).where(Attempt.id == checkpoint.attempt_id))
    return current_checkpoint_view(session, project.name, run.name, checkpoint), config


def _shared(session: Session, one: str, other: str) -> tuple[int, int]:
    """How many distinct chunks both need, and their bytes. By digest: each project has rows of its own. As sets:
    SQLite would join them by comparing each chunk of the one with each of the other."""
    both = intersect(_chunks_of(one), _chunks_of(other)).subquery()
    query = select(func.count(), func.coalesce(func.sum(both.c.bytes), 0)).select_from(both)
    count, size = session.execute(query).one()
    return count, int(size)


def _chunks_of(checkpoint_id: str) -> Select[str, int]:
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
    needed = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    return select(Chunk.digest, Chunk.bytes).where(Chunk.id.in_(needed))
