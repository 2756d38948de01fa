"""The fence: every write of a training job passes it, under the run's lock (rules lock-order, fencing-token and
late-save-adoption)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.base import Fence
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AttemptOutcome, CheckpointState, ShardState
from holdfast_service.auth.principal import Principal
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.engine import refuse_if_went_back
from holdfast_service.db.tables.core import SILENT, Attempt, Checkpoint, Project, Run, Shard
from holdfast_service.db.tables.operations import Controller
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import attempt_numbered, checkpoint_by_id
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.processes import last_served_at


def pass_fence(session: Session, run_id: str, fence: Fence, epoch: int, *, newest: bool = True) -> tuple[Run, Attempt]:
    """Take the run's row FOR SHARE and let only the newest attempt of this epoch through. Raises `stale_attempt`, and
    `catalog_went_back`.

    SHARE, not KEY SHARE: opening an attempt takes the row FOR UPDATE, and nothing of an older attempt may commit
    after the new one was told where to resume. `newest=False` is for a detached branch, which can change nothing
    that an attempt was told: any attempt of this epoch passes, and one that is not there is `attempt_not_found`.
    """
    refuse_if_went_back(session)
    run = session.execute(
        select(Run).where(Run.id == run_id).with_for_update(read=True), execution_options={"populate_existing": True}
    ).scalar_one()
    if run.deleted_at is not None:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"This run was deleted by {run.deleted_by}, and takes nothing any more. Stop this job and do not restart "
            "it. If the run is to go on, take it back first: `holdfast runs undelete PROJECT/RUN`.",
            attempt=fence.attempt,
            latest_attempt=run.latest_attempt,
        )
    if fence.epoch != epoch:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"The catalog is at epoch {epoch} and this attempt was opened in epoch {fence.epoch}: the catalog was "
            "restored or cloned since. Launch the job again.",
            epoch=epoch,
        )
    if newest and fence.attempt > run.latest_attempt:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"This run has no attempt {fence.attempt}, only {run.latest_attempt}: the database went back to an older "
            "state since this job opened it. Launch the job again.",
            attempt=fence.attempt,
        )
    if newest and fence.attempt != run.latest_attempt:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"Attempt {fence.attempt} was fenced: attempt {run.latest_attempt} has taken over this run. Stop this "
            "job and do not restart it.",
            attempt=fence.attempt,
            latest_attempt=run.latest_attempt,
        )
    attempt = attempt_numbered(session, run, fence.attempt)
    if not is_of_launch(attempt, fence):
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"Attempt {fence.attempt} of this run is another launch's: the database went back to an older state since "
            "this job opened its own, and the number was given again. Stop this job and do not restart it.",
            attempt=fence.attempt,
            latest_attempt=run.latest_attempt,
        )
    return run, attempt


def is_of_launch(attempt: Attempt, fence: Fence) -> bool:
    """Whether it is the attempt that the fence's launch has opened. An older client does not say which launch it is."""
    return fence.launch_id in (None, attempt.launch_id)


# Fenced attempts that may have been dead before, and until when one that lives could have said so.
#
# training/attempts.py fences  ->  liveness/abandoned_uploads.py excuses what could not be heard  ->
# liveness/stalled_attempts.py settles

REAPER = "reap"
_FORGOTTEN_AFTER = timedelta(days=1)
"""What was fenced before attempts told of themselves stays as it was."""


def is_silent(by: datetime) -> ColumnElement[bool]:
    """Over `attempts`: fenced, or excused, at most a day before `by`, and not heard of since."""
    since = by - _FORGOTTEN_AFTER
    return and_(text(SILENT), or_(Attempt.ended_at > since, Attempt.excused_until > since))


def heard_until(session: Session, now: datetime) -> datetime:
    """Silence counts until then: while no process served nobody could call, and a gap that the reaper has not seen yet
    is not excused yet."""
    reaped_at = session.scalar(select(Controller.reconciled_at).where(Controller.name == REAPER))
    return min(moment for moment in (now, reaped_at, last_served_at(session)) if moment is not None)


# A training job's write into one checkpoint: find it, pass the fence, say that the job is alive.
#
# Every call of a rank begins here; the rows are locked in the order run, checkpoint.

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
    # Whether it is detached is settled at its begin, so it can be read before the lock.
    run, pusher = pass_fence(session, run.id, fence, epoch, newest=not checkpoint.detached)
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


def keep_alive(session: Session, writing: Writing, settings: ServiceSettings, now: datetime) -> None:
    """Each call of a rank moves the deadline after which the reaper gives the checkpoint up, and its own heartbeat.
    `now`: the database's clock in this transaction."""
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


# One rank's shard of a checkpoint, as a row.


def shard_of(session: Session, checkpoint: Checkpoint, rank: int) -> Shard | None:
    """None if the rank has not called yet. Raises `invalid_request` for a rank outside the world."""
    refuse_unless_in_world(checkpoint, rank)
    return session.execute(
        select(Shard).where(Shard.checkpoint_id == checkpoint.id, Shard.rank == rank),
        execution_options={"populate_existing": True},
    ).scalar_one_or_none()


def locked_shard(session: Session, checkpoint: Checkpoint, rank: int) -> Shard:
    """FOR UPDATE: a late negotiation of the same rank must not add references while it is sealed. Made if absent."""
    refuse_unless_in_world(checkpoint, rank)
    locked = select(Shard).where(Shard.checkpoint_id == checkpoint.id, Shard.rank == rank).with_for_update()
    anew = {"populate_existing": True}
    if (shard := session.execute(locked, execution_options=anew).scalar_one_or_none()) is not None:
        return shard
    insert_absent(
        session,
        Shard,
        [
            {
                "checkpoint_id": checkpoint.id,
                "rank": rank,
                "state": ShardState.OPEN,
                "logical_bytes": 0,
                "uploaded_bytes": 0,
                "components": {},
                "finite": True,
            }
        ],
    )
    return session.execute(locked, execution_options=anew).scalar_one()
