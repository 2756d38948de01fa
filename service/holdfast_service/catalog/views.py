"""From rows to what the wire shows. Whoever answers with a checkpoint or an attempt builds it here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.attempts import AttemptView, NoticeView
from holdfast_protocol.checkpoints import CheckpointView, Component, MetricValue
from holdfast_protocol.states import (
    AbortCause,
    AttemptOutcome,
    CheckpointKind,
    CheckpointState,
    Doing,
    Health,
    ShardState,
    Tier,
)
from holdfast_service.catalog.tables import Attempt, Checkpoint, Shard

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
        off_line=row.off_line,
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
