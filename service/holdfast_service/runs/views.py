"""What the wire shows: checkpoints, attempts and runs from their rows, and the manifest of a committed checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.orm import Session

from holdfast_protocol.attempts import AttemptView, NoticeView
from holdfast_protocol.checkpoints import (
    CheckpointView,
    ChunkRef,
    Component,
    Manifest,
    MetricValue,
    ShardChunks,
    ShardView,
)
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import InTrash
from holdfast_protocol.states import (
    AbortCause,
    AttemptOutcome,
    CheckpointKind,
    CheckpointState,
    Doing,
    Health,
    RunStatus,
    ShardState,
    Tier,
)
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Attempt, Checkpoint, Chunk, ChunkListEntry, Project, Run, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.restore_choice import refuse_unless_whole
from holdfast_service.runs.find import checkpoint_by_id

# From rows to what the wire shows of a checkpoint, an attempt and a run.

# How a run fares, from its newest attempt: one rule, for one row and for a query.

_ENDED = {
    AttemptOutcome.FINISHED: RunStatus.FINISHED,
    AttemptOutcome.FAILED: RunStatus.FAILED,
    AttemptOutcome.PREEMPTED: RunStatus.PREEMPTED,
    AttemptOutcome.LOST: RunStatus.LOST,
}


def run_status() -> ColumnElement[str]:
    """Over `runs`, outer joined with their newest `attempts`."""
    return case(
        *((Attempt.outcome == outcome.value, status.value) for outcome, status in _ENDED.items()),
        (Attempt.stalled_at.is_not(None), RunStatus.STALLED.value),
        (Attempt.id.is_not(None) & Attempt.ended_at.is_(None), RunStatus.TRAINING.value),
        else_=RunStatus.IDLE.value,
    )


def status_detail(attempt: Attempt | None) -> str | None:
    """Why it is so, for people."""
    if attempt is None:
        return None
    if attempt.outcome is None and attempt.stalled_at is not None:
        return f"alive, and no progress since {attempt.stalled_at:%Y-%m-%d %H:%M:%S} UTC"
    if attempt.error_rank is not None:
        return f"rank {attempt.error_rank}: {attempt.outcome_detail}"
    return attempt.outcome_detail


# What is told of a run or a project that was deleted.

PURGED = "(purged)"


def in_trash(found: Project | Run) -> InTrash | None:
    """How it can be taken back; None for what is not deleted."""
    if found.deleted_at is None or found.deleted_by is None or found.purge_at is None:
        return None
    return InTrash(
        deleted_at=found.deleted_at,
        deleted_by=found.deleted_by,
        reason=found.delete_reason,
        purge_at=found.purge_at,
    )


def project_label(name: str) -> str:
    """For metrics, by a project's name: all that are purged under one, or each would be a label for ever."""
    return PURGED if "~" in name else name


# From rows to what the wire shows. Whoever answers with a checkpoint or an attempt builds it here.

MISSING_RANKS_SHOWN = 20


@dataclass(frozen=True)
class SealProgress:
    """How many ranks have sealed, and the first MISSING_RANKS_SHOWN that have not."""

    sealed_ranks: int
    missing_ranks: list[int] = field(default_factory=list)


def checkpoint_view(
    project_name: str, run_name: str, row: Checkpoint, sealed_ranks: int, missing_ranks: Sequence[int]
) -> CheckpointView:
    """`sealed_ranks` and `missing_ranks` come from `seal_progress`."""
    return CheckpointView(
        id=row.id,
        project=project_name,
        run=run_name,
        attempt=row.attempt_number,
        step=row.step,
        kind=CheckpointKind(row.kind),
        world_size=row.world_size,
        state=CheckpointState(row.state),
        health=Health(row.health),
        health_reason=row.health_reason,
        tier=Tier(row.tier),
        digest=row.digest,
        logical_bytes=row.logical_bytes,
        chunk_bytes=row.chunk_bytes,
        uploaded_bytes=row.uploaded_bytes,
        deduplicated_bytes=row.deduplicated_bytes,
        metrics={name: MetricValue.model_validate(value) for name, value in row.metrics.items()},
        labels=list(row.labels),
        components={name: Component.model_validate(value) for name, value in row.components.items()},
        missing_components=list(row.missing_components or ()),
        created_at=row.created_at,
        committed_at=row.committed_at,
        aborted_at=row.aborted_at,
        abort_reason=row.abort_reason,
        abort_rank=row.abort_rank,
        pushed_by=row.pushed_by,
        detached=row.detached,
        pinned_at=row.pinned_at,
        pinned_by=row.pinned_by,
        pin_reason=row.pin_reason,
        pinned_until=row.pinned_until,
        trashed_at=row.trashed_at,
        trashed_by=row.trashed_by,
        trash_reason=row.trash_reason,
        purge_at=row.purge_at,
        deleted_at=row.deleted_at,
        abort_cause=None if row.abort_cause is None else AbortCause(row.abort_cause),
        blocked_seconds=row.blocked_seconds,
        sealed_ranks=sealed_ranks,
        missing_ranks=list(missing_ranks),
        etag=f'"{row.version}"',
    )


def seal_progress(session: Session, checkpoints: Iterable[Checkpoint]) -> dict[str, SealProgress]:
    """By checkpoint id. What was ever committed is known to be sealed; only the others are asked for."""
    progress: dict[str, SealProgress] = {}
    open_ones: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        if checkpoint.committed_at is not None:
            progress[checkpoint.id] = SealProgress(checkpoint.world_size)
        else:
            open_ones[checkpoint.id] = checkpoint
    if not open_ones:
        return progress
    sealed: dict[str, set[int]] = {checkpoint_id: set() for checkpoint_id in open_ones}
    for checkpoint_id, rank in session.execute(
        select(Shard.checkpoint_id, Shard.rank).where(
            Shard.checkpoint_id.in_(open_ones), Shard.state == ShardState.SEALED
        )
    ):
        sealed[checkpoint_id].add(rank)
    for checkpoint_id, ranks in sealed.items():
        progress[checkpoint_id] = SealProgress(len(ranks), missing_ranks(ranks, open_ones[checkpoint_id].world_size))
    return progress


def missing_ranks(sealed: set[int], world_size: int) -> list[int]:
    """The first MISSING_RANKS_SHOWN ranks of the world that are not among `sealed`."""
    missing: list[int] = []
    for rank in range(world_size):
        if rank not in sealed:
            missing.append(rank)
            if len(missing) == MISSING_RANKS_SHOWN:
                break
    return missing


def current_checkpoint_view(session: Session, project_name: str, run_name: str, row: Checkpoint) -> CheckpointView:
    """The view with its progress read in this session."""
    progress = seal_progress(session, [row])[row.id]
    return checkpoint_view(project_name, run_name, row, progress.sealed_ranks, progress.missing_ranks)


def attempt_view(row: Attempt, *, listed: bool = False) -> AttemptView:
    return AttemptView(
        number=row.number,
        launch_id=row.launch_id,
        world_size=row.world_size,
        host=row.host,
        environment={} if listed else dict(row.environment),
        opened_at=row.opened_at,
        heartbeat_at=row.heartbeat_at,
        first_step=row.first_step,
        first_step_at=row.first_step_at,
        last_step=row.last_step,
        steps_run=row.steps_run,
        steps_per_second=row.steps_per_second,
        doing=None if row.doing is None else Doing(row.doing),
        progressed_at=row.progressed_at,
        stalled_at=row.stalled_at,
        restore_seconds=row.restore_seconds,
        saves_begun=row.saves_begun,
        save_blocked_seconds=row.save_blocked_seconds,
        ended_at=row.ended_at,
        outcome=None if row.outcome is None else AttemptOutcome(row.outcome),
        outcome_detail=row.outcome_detail,
        error_type=row.error_type,
        error_rank=row.error_rank,
        notice=None if row.notice is None else NoticeView.model_validate(row.notice),
        refused_at=row.refused_at,
        resumed_from=row.resumed_from_id,
        rolled_back_at=row.rolled_back_at,
    )


# What a committed checkpoint consists of: its shards, and the chunks of one shard in their order.


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
            index_digest=index_digest,
            **dict(shard.summary),
        )
        for shard, index_digest in rows
    ]
