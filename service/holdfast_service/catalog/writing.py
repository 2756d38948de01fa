"""A training job's write into one checkpoint: find it, pass the fence, say that the job is alive.

Every call of a rank begins here; the rows are locked in the order run, checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.fencing import Fence
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AttemptOutcome, CheckpointState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.fencing import pass_fence
from holdfast_service.catalog.resolve import checkpoint_by_id
from holdfast_service.catalog.tables import Attempt, Checkpoint, Project, Run
from holdfast_service.clock import database_now
from holdfast_service.errors import ProblemError
from holdfast_service.settings import ServiceSettings

# A rank that crashes says so at once, and its saves in flight and in the queue end afterwards: so long they may go on.
DRAIN_SECONDS = 60

# A deadline is moved when a twentieth of it has passed: a thousand ranks must not all write one row in each call.
_MOVED_AFTER = 1 / 20


@dataclass(frozen=True)
class Writing:
    """The rows of the call. The checkpoint's are as they are under the lock.

    `attempt` is the one that the checkpoint belongs to, and so do the copies that it uploads; `pusher` is the one that
    calls. They differ only where an attempt pushes what an older one had spooled.
    """

    project: Project
    run: Run
    attempt: Attempt
    pusher: Attempt
    checkpoint: Checkpoint


def begin_writing(
    session: Session,
    caller: Principal,
    checkpoint_id: str,
    fence: Fence,
    epoch: int,
    *,
    lock: bool = False,
    compares: bool = False,
) -> Writing:
    """`lock` takes the checkpoint's row FOR UPDATE. Raises `checkpoint_not_found`, `stale_attempt` and, for another
    attempt's checkpoint, `checkpoint_conflict`; not if it is committed and the caller only `compares`.
    """
    project, run, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
    # Whether it is off the line is settled at its begin, so it can be read before the lock.
    run, pusher = pass_fence(session, run.id, fence, epoch, newest=not checkpoint.off_line)
    statement = select(Checkpoint).where(Checkpoint.id == checkpoint_id)
    if lock:
        statement = statement.with_for_update()
    # Read anew behind the fence: what was seen before it may have been aborted while the lock was waited for.
    checkpoint = session.execute(statement, execution_options={"populate_existing": True}).scalar_one()
    if not (compares and checkpoint.state == CheckpointState.COMMITTED):
        refuse_unless_pusher(checkpoint, fence)
    attempt = pusher if checkpoint.attempt_id == pusher.id else session.get_one(Attempt, checkpoint.attempt_id)
    return Writing(project, run, attempt, pusher, checkpoint)


def refuse_unless_pusher(checkpoint: Checkpoint, fence: Fence) -> None:
    """A late save is written by the attempt that pushes it, any other by its own. Raises `checkpoint_conflict`."""
    writer = checkpoint.attempt_number if checkpoint.pushed_by is None else checkpoint.pushed_by
    if writer != fence.attempt:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"The checkpoint {checkpoint.id} is written by attempt {writer}, and attempt {fence.attempt} cannot write "
            "into it. Begin one of your own, or wait for its outcome.",
            checkpoint_id=checkpoint.id,
            attempt=writer,
        )


def refuse_unless_uploading(checkpoint: Checkpoint) -> None:
    """Raises `checkpoint_aborted` with its reason, or `shard_sealed` for one that is committed."""
    if checkpoint.state == CheckpointState.UPLOADING:
        return
    if checkpoint.state == CheckpointState.ABORTED:
        raise ProblemError(
            ProblemCode.CHECKPOINT_ABORTED,
            f"Step {checkpoint.step} was aborted: {checkpoint.abort_reason}. Begin it anew, or go on with the next "
            "save.",
            checkpoint_id=checkpoint.id,
            rank=checkpoint.abort_rank,
            reason=checkpoint.abort_reason,
            cause=checkpoint.abort_cause,
        )
    raise ProblemError(
        ProblemCode.SHARD_SEALED,
        f"Step {checkpoint.step} is {checkpoint.state}: all its shards are sealed and nothing can be added.",
        checkpoint_id=checkpoint.id,
    )


def refuse_unless_in_world(checkpoint: Checkpoint, rank: int) -> None:
    if not 0 <= rank < checkpoint.world_size:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"There is no rank {rank} in a world of {checkpoint.world_size}. Begin the step with the right world size.",
            rank=rank,
            world_size=checkpoint.world_size,
        )


def keep_alive(session: Session, writing: Writing, settings: ServiceSettings) -> None:
    """Each call of a rank moves the deadline after which the reaper gives the checkpoint up, and its own heartbeat."""
    now = database_now(session)
    idle = timedelta(seconds=settings.upload_idle_seconds)
    moved_from = now + idle * (1 - _MOVED_AFTER)
    checkpoint = writing.checkpoint
    if checkpoint.state == CheckpointState.UPLOADING and checkpoint.deadline_at < moved_from:
        session.execute(
            update(Checkpoint)
            .where(
                Checkpoint.id == checkpoint.id,
                Checkpoint.state == CheckpointState.UPLOADING,
                Checkpoint.deadline_at < moved_from,
            )
            .values(deadline_at=now + idle),
            execution_options={"synchronize_session": False},
        )
    beat(session, writing.pusher, now, settings)


def beat(session: Session, attempt: Attempt, now: datetime, settings: ServiceSettings) -> None:
    """The attempt is alive, even if it was thought lost: a network may have been away and come back."""
    due = now - timedelta(seconds=settings.heartbeat_interval_seconds * _MOVED_AFTER)
    # Whoever would think it lost meanwhile goes by a heartbeat that is much older.
    if attempt.heartbeat_at is not None and attempt.heartbeat_at >= due and attempt.outcome != AttemptOutcome.LOST:
        return
    session.execute(
        update(Attempt)
        .where(Attempt.id == attempt.id, or_(Attempt.heartbeat_at.is_(None), Attempt.heartbeat_at < due))
        .values(heartbeat_at=now),
        execution_options={"synchronize_session": False},
    )
    session.execute(
        update(Attempt)
        .where(Attempt.id == attempt.id, Attempt.outcome == AttemptOutcome.LOST)
        .values(ended_at=None, outcome=None, outcome_detail=None),
        execution_options={"synchronize_session": False},
    )


def reached(session: Session, attempt: Attempt, step: int) -> None:
    """`attempt` is known to have come to `step`: it told so, or a save of that step was begun. The one place where
    `last_step`, the last step that it is known to have reached, moves; it never goes back."""
    if attempt.last_step is not None and attempt.last_step >= step:
        return
    session.execute(
        update(Attempt)
        .where(Attempt.id == attempt.id, or_(Attempt.last_step.is_(None), Attempt.last_step < step))
        .values(last_step=step),
        execution_options={"synchronize_session": "fetch"},
    )


def lock_attempt(session: Session, attempt: Attempt) -> None:
    """Takes the row FOR NO KEY UPDATE and reads it anew. Behind the fence, so after the run's lock.

    Not FOR UPDATE: who has inserted a checkpoint holds the row FOR KEY SHARE, for it refers to the attempt, and goes on
    to write its heartbeat. That would wait for this lock, and this one for it.
    """
    session.execute(
        select(Attempt).where(Attempt.id == attempt.id).with_for_update(key_share=True),
        execution_options={"populate_existing": True},
    )
