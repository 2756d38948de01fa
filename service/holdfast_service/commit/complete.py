"""The commit itself: if all ranks have sealed, the checkpoint becomes a restore point, in the last seal's transaction.

The caller holds the checkpoint's row FOR UPDATE. Counting happens in a later statement than that lock, under READ
COMMITTED: so the last of two simultaneous seals sees the other's (protocol rule 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.digests import checkpoint_digest
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState, Health, ShardState
from holdfast_protocol.webhooks import WebhookEvent
from holdfast_service.catalog.copies import is_usable_by
from holdfast_service.catalog.declared import first_components
from holdfast_service.catalog.memory import note_change
from holdfast_service.catalog.tables import Attempt, Checkpoint, Chunk, ChunkListEntry, Copy, Shard
from holdfast_service.catalog.webhook_outbox import leave_calls
from holdfast_service.catalog.writing import Writing
from holdfast_service.commit.merge import diverged_reason, merge_components, missing_components
from holdfast_service.errors import ProblemError

_SHOWN_DIGESTS = 20


def complete_if_whole(session: Session, writing: Writing, store_id: int, now: datetime) -> bool:
    """Whether it committed. Raises `chunk_gone` if a chunk that a rank sealed is not to be relied on any more, and
    `invalid_request` if two ranks give one chunk two sizes."""
    checkpoint = writing.checkpoint
    sealed = session.scalar(
        select(func.count()).where(Shard.checkpoint_id == checkpoint.id, Shard.state == ShardState.SEALED)
    )
    if sealed != checkpoint.world_size:
        return False
    _refuse_lost_chunks(session, checkpoint, store_id)
    shards = session.scalars(
        select(Shard).where(Shard.checkpoint_id == checkpoint.id).order_by(Shard.rank),
        execution_options={"populate_existing": True},
    ).all()
    _fill(checkpoint, shards)
    checkpoint.missing_components = _missing_components(session, checkpoint, shards)
    checkpoint.chunk_bytes = _distinct_chunk_bytes(session, checkpoint)
    checkpoint.state = CheckpointState.COMMITTED
    checkpoint.committed_at = now
    checkpoint.version += 1
    if not checkpoint.off_line:
        _cut_the_line(session, writing.attempt, now)
    if checkpoint.health == Health.DIVERGED:
        _tell_diverged(session, writing)
    note_change(session, f"step {checkpoint.step} of {writing.project.name}/{writing.run.name} was committed")
    return True


def _tell_diverged(session: Session, writing: Writing) -> None:
    leave_calls(
        session,
        WebhookEvent.CHECKPOINT_DIVERGED,
        writing.checkpoint.id,
        project_id=writing.project.id,
        run_id=writing.run.id,
        attempt=writing.attempt.number,
        step=writing.checkpoint.step,
        checkpoint_id=writing.checkpoint.id,
        reason=writing.checkpoint.health_reason,
    )


def _refuse_lost_chunks(session: Session, checkpoint: Checkpoint, store_id: int) -> None:
    usable = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, is_usable_by(store_id, checkpoint.attempt_id))
    lost = session.execute(
        select(Shard.rank, Chunk.digest)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(Shard.checkpoint_id == checkpoint.id, ~usable)
        .order_by(Shard.rank, ChunkListEntry.ordinal)
        .limit(_SHOWN_DIGESTS)
    ).all()
    if lost:
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The chunk {lost[0].digest} of rank {lost[0].rank} is not readable any more, so step {checkpoint.step} "
            "cannot be committed. Save again.",
            checkpoint_id=checkpoint.id,
            rank=lost[0].rank,
            digests=[row.digest for row in lost],
        )


def _fill(checkpoint: Checkpoint, shards: Sequence[Shard]) -> None:
    metrics: dict[str, Any] = shards[0].metrics or {}
    checkpoint.digest = checkpoint_digest([str(shard.digest) for shard in shards])
    checkpoint.metrics = metrics
    checkpoint.components = merge_components([shard.components for shard in shards])
    checkpoint.logical_bytes = sum(shard.logical_bytes for shard in shards)
    checkpoint.uploaded_bytes = sum(shard.uploaded_bytes for shard in shards)
    checkpoint.deduplicated_bytes = sum(shard.deduplicated_bytes for shard in shards)
    said = {shard.rank: shard.verdict for shard in shards if shard.verdict is not None}
    reason = diverged_reason([shard.rank for shard in shards if not shard.finite], metrics, said)
    if reason is not None:
        checkpoint.health = Health.DIVERGED
        checkpoint.health_reason = reason


def _missing_components(session: Session, checkpoint: Checkpoint, shards: Sequence[Shard]) -> list[str] | None:
    """Null where there is none; an empty list would only be another word for it."""
    declared = first_components(session, checkpoint.run_id)
    dropped = shards[0].dropped_components or ()
    return missing_components(declared, checkpoint.components, dropped) or None


def _distinct_chunk_bytes(session: Session, checkpoint: Checkpoint) -> int:
    """Raises `invalid_request`: within a checkpoint, readers and records name a chunk by its digest alone."""
    distinct = (
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(Shard.checkpoint_id == checkpoint.id)
    )
    of_checkpoint = Chunk.id.in_(distinct)
    total, chunks, digests = session.execute(
        select(func.coalesce(func.sum(Chunk.bytes), 0), func.count(), func.count(Chunk.digest.distinct())).where(
            of_checkpoint
        )
    ).one()
    if digests < chunks:
        twice = select(Chunk.digest).where(of_checkpoint).group_by(Chunk.digest).having(func.count() > 1).limit(1)
        digest = session.execute(twice).scalar_one()
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"Two ranks of step {checkpoint.step} give the chunk {digest} two sizes, so the step cannot be committed. "
            "One content has one size: hash and measure the same buffer, and save again.",
            digest=digest,
        )
    return int(total)


def _cut_the_line(session: Session, attempt: Attempt, now: datetime) -> None:
    """The attempt's first commit makes its line the run's (protocol rule 3)."""
    session.execute(
        update(Attempt).where(Attempt.id == attempt.id, Attempt.cut_at.is_(None)).values(cut_at=now),
        execution_options={"synchronize_session": False},
    )
