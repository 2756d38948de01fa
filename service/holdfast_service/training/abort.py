"""Giving a checkpoint up: by its job, by a rank that failed, by a newer attempt, by the reaper."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import AbortCheckpoint, CheckpointView, FailShard
from holdfast_protocol.events import EventType
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AbortCause, CheckpointState, ShardState
from holdfast_protocol.text import without_secrets
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Run
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import announce
from holdfast_service.runs.views import current_checkpoint_view
from holdfast_service.training.fencing import (
    begin_writing,
    lock_checkpoint,
    locked_shards,
    refuse_unless_uploading,
)


def abort(
    session: Session,
    checkpoint: Checkpoint,
    reason: str,
    now: datetime,
    *,
    cause: AbortCause,
    rank: int | None = None,
) -> None:
    """`rank` is the one to blame, if it is known. The same step can be begun anew afterwards (rule
    one-checkpoint-per-step). The caller has locked the row, and tells the notifier after its transaction."""
    if checkpoint.state != CheckpointState.UPLOADING:
        raise ValueError(f"a checkpoint that is {checkpoint.state} cannot be aborted")
    checkpoint.state = CheckpointState.ABORTED
    checkpoint.aborted_at = now
    checkpoint.abort_reason = reason
    checkpoint.abort_rank = rank
    checkpoint.abort_cause = cause
    checkpoint.version += 1
    announce(
        session,
        EventType.CHECKPOINT_ABORTED,
        checkpoint.id,
        now,
        project_id=session.execute(select(Run.project_id).where(Run.id == checkpoint.run_id)).scalar_one(),
        run_id=checkpoint.run_id,
        attempt=checkpoint.attempt_number,
        step=checkpoint.step,
        checkpoint_id=checkpoint.id,
        reason=reason,
    )


def abort_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: AbortCheckpoint
) -> CheckpointView:
    """The job gives a checkpoint up. Repeating it is fine; what is committed stays committed. Raises
    `checkpoint_conflict` if it has committed meanwhile."""
    reason = without_secrets(request.reason)
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, lock=True)
        checkpoint = writing.checkpoint
        if checkpoint.state == CheckpointState.UPLOADING:
            abort(session, checkpoint, reason, database_now(session), cause=AbortCause.JOB)
            record_event(
                session,
                Actor.person(caller),
                "checkpoint.abort",
                project_id=writing.project.id,
                run_id=writing.run.id,
                checkpoint_id=checkpoint_id,
                reason=reason,
            )
            session.flush()
        elif checkpoint.state != CheckpointState.ABORTED:
            raise ProblemError(
                ProblemCode.CHECKPOINT_CONFLICT,
                f"Step {checkpoint.step} is {checkpoint.state} and cannot be aborted any more. Delete it, if it is not "
                "wanted.",
                checkpoint_id=checkpoint_id,
                state=checkpoint.state,
            )
        view = current_checkpoint_view(session, writing.project.name, writing.run.name, checkpoint)
    context.notifier.notify(checkpoint_id)
    return view


def fail_shard(
    context: ServiceContext, caller: Principal, checkpoint_id: str, rank: int, request: FailShard
) -> CheckpointView:
    """A rank says that its share failed: the checkpoint is aborted at once and names the rank (rule
    no-failure-after-seal). Raises `shard_sealed` once the rank has sealed: a lost seal reply must not abort a good
    checkpoint."""
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch)
        checkpoint = writing.checkpoint
        if checkpoint.state == CheckpointState.UPLOADING:
            shard = locked_shards(session, checkpoint, [rank])[rank]
            lock_checkpoint(session, checkpoint)  # in the order of a seal
        if checkpoint.state != CheckpointState.ABORTED:
            refuse_unless_uploading(checkpoint)
            if shard.state == ShardState.SEALED:
                raise ProblemError(
                    ProblemCode.SHARD_SEALED,
                    f"Rank {rank} has sealed its shard of step {checkpoint.step} and cannot report failure any more. "
                    "Its share is safe; wait for the checkpoint to commit.",
                    rank=rank,
                )
            shard.state = ShardState.FAILED
            abort(
                session,
                checkpoint,
                f"rank {rank} failed: {without_secrets(request.reason)}",
                database_now(session),
                cause=AbortCause.RANK_FAILED,
                rank=rank,
            )
            session.flush()
        view = current_checkpoint_view(session, writing.project.name, writing.run.name, checkpoint)
    context.notifier.notify(checkpoint_id)
    return view
