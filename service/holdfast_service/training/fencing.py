"""The fence: every write of a training job passes it, under the run's lock (rules lock-order, fencing-token and
late-save-adoption)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from sqlalchemy import ColumnElement, Select, and_, bindparam, false, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.base import Fence
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AttemptOutcome, CheckpointState, ShardState
from holdfast_service.auth.principal import CALLERS_TOKEN, TOKEN_COLUMNS, Principal, execute_for_caller
from holdfast_service.db.dialect import clock, database_now, dialect_of, insert_new
from holdfast_service.db.engine import history_columns, history_known, refuse_gone_back
from holdfast_service.db.tables.core import SILENT, Attempt, CatalogIdentity, Checkpoint, Project, Run, Shard, Token
from holdfast_service.db.tables.operations import Controller
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import announce_revival
from holdfast_service.runs.views import attempt_numbered, no_checkpoint, refuse_if_deleted, run_named
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.processes import last_served_at


@dataclass(frozen=True)
class Fenced:
    """What a call has passed the fence with, as it is behind the run's lock. `attempt` is the one that calls. `now`:
    the database's clock."""

    project: Project
    run: Run
    attempt: Attempt
    checkpoint: Checkpoint | None
    now: datetime


class _Read(Enum):
    """Which checkpoint is read behind the fence: none, one by its id, or the attempt's own of a step on its line."""

    NONE = "none"
    ID = "id"
    STEP = "step"


LIVE = (CheckpointState.UPLOADING, CheckpointState.COMMITTED)
_CHECKPOINT = {
    _Read.NONE: false(),
    _Read.ID: Checkpoint.id == bindparam("checkpoint_id"),
    _Read.STEP: and_(
        Checkpoint.run_id == bindparam("run_id"),
        Checkpoint.attempt_number == bindparam("number"),
        Checkpoint.step == bindparam("step"),
        ~Checkpoint.detached,
        Checkpoint.state.in_(LIVE),
    ),
}
_ANEW = {"populate_existing": True}


def lock_run(session: Session, caller: Principal, project: str, run: str) -> tuple[Project, Run]:
    """The run's row FOR SHARE, also if it is in the trash. Raises `unauthenticated`, `forbidden`, `project_not_found`
    and `run_not_found`.

    SHARE, not KEY SHARE: opening an attempt takes the row FOR UPDATE, and nothing of an older attempt may commit after
    the new one was told where to resume.
    """
    caller.check_project_name(project)
    row = execute_for_caller(session, caller, _LOCKED_BY_NAME, {"project": project, "run": run})
    if row is None:
        return run_named(session, caller, project, run, deleted=True)  # says which of them there is not
    if row.Project.purged_at is not None or row.Run.purged_at is not None:
        refuse_if_deleted(row.Project, row.Run)
    return row.Project, row.Run


_FOUND = select(Project, Run, *TOKEN_COLUMNS).join(Run, Run.project_id == Project.id).join(Token, CALLERS_TOKEN)
_LOCKED_BY_NAME = _FOUND.where(Project.name == bindparam("project"), Run.name == bindparam("run")).with_for_update(
    read=True, of=Run
)
_FOUND_BY_CHECKPOINT = _FOUND.join(Checkpoint, Checkpoint.run_id == Run.id).where(
    Checkpoint.id == bindparam("checkpoint_id")
)
_LOCKED_BY_CHECKPOINT = _FOUND_BY_CHECKPOINT.with_for_update(read=True, of=Run)


def pass_fence(
    session: Session,
    locked: tuple[Project, Run],
    fence: Fence,
    epoch: int,
    *,
    newest: bool = True,
    step: int | None = None,
) -> Fenced:
    """Lets only the newest attempt of this epoch through. `locked`: by `lock_run`. With the attempt's live checkpoint
    of `step`, if it has one. Raises `stale_attempt`, and `catalog_went_back`.

    `newest=False` is for a detached branch, which can change nothing that an attempt was told: any attempt of this
    epoch passes, and one that is not there is `attempt_not_found`.
    """
    read = _Read.NONE if step is None else _Read.STEP
    attempt, checkpoint, now = _behind(session, locked[1], fence, read, step=step)
    return Fenced(*locked, _checked(session, locked[1], attempt, fence, epoch, newest=newest), checkpoint, now)


def _behind(
    session: Session, run: Run, fence: Fence, read: _Read, **names: object
) -> tuple[Attempt | None, Checkpoint | None, datetime]:
    """One statement, later than the run's lock. Raises `catalog_went_back`."""
    known = history_known(session)
    statement = _statement_behind(dialect_of(session), read)
    values = {"run_id": run.id, "number": fence.attempt, **names}
    attempt, checkpoint, found, server, moment = session.execute(statement, values, execution_options=_ANEW).one()
    refuse_gone_back(session, known, found, server)
    return attempt, checkpoint, database_now(session, moment)


@functools.cache  # to put it together takes longer than to run it
def _statement_behind(dialect: str, read: _Read) -> Select[Attempt, Checkpoint, str | None, str, datetime]:
    return (
        select(Attempt, Checkpoint, *history_columns(dialect), clock())
        .select_from(CatalogIdentity)
        .outerjoin(Attempt, and_(Attempt.run_id == bindparam("run_id"), Attempt.number == bindparam("number")))
        .outerjoin(Checkpoint, _CHECKPOINT[read])
    )


def _checked(session: Session, run: Run, attempt: Attempt | None, fence: Fence, epoch: int, *, newest: bool) -> Attempt:
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
    if attempt is None:
        attempt = attempt_numbered(session, run, fence.attempt)  # says that there is none
    if not is_of_launch(attempt, fence):
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"Attempt {fence.attempt} of this run is another launch's: the database went back to an older state since "
            "this job opened its own, and the number was given again. Stop this job and do not restart it.",
            attempt=fence.attempt,
            latest_attempt=run.latest_attempt,
        )
    return attempt


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
    """Silence counts until then: while no process served, no job could call, and a gap that the reaper has not seen yet
    is not excused yet."""
    reaped_at = session.scalar(select(Controller.reconciled_at).where(Controller.name == REAPER))
    return min(moment for moment in (now, reaped_at, last_served_at(session)) if moment is not None)


# A training job's write into one checkpoint: find it, pass the fence, say that the job is alive.
#
# Every call of a rank begins here; the rows are locked in the order run, checkpoint.

# A job tells of its end before its saves in flight are over: so long they may go on without a call. A rank that crashes
# says so at once, and begins what it had queued within this time.
DRAIN_SECONDS = 60

# A deadline is moved when a twentieth of it has passed: a thousand ranks must not all write one row in each call.
MOVED_AFTER = 1 / 20


@dataclass(frozen=True)
class Writing:
    """The rows of the call. The checkpoint's are as they are under the lock. `now`: the database's clock behind the
    fence.

    `attempt` is the one that the checkpoint belongs to, and so do the copies that it uploads; `pusher` is the one that
    calls. They differ only where an attempt pushes what an older one had spooled.
    """

    project: Project
    run: Run
    attempt: Attempt
    pusher: Attempt
    checkpoint: Checkpoint
    now: datetime


def begin_writing(
    session: Session,
    caller: Principal,
    checkpoint_id: str,
    fence: Fence,
    epoch: int,
    *,
    lock: bool = False,
    only_looks: bool = False,
) -> Writing:
    """`lock`: with `lock_checkpoint`. `only_looks`: nothing is locked, so what is found may be over when it is used.
    Raises `unauthenticated`, `checkpoint_not_found`, `stale_attempt` and, for another attempt's checkpoint,
    `checkpoint_conflict`; not if it is committed and the caller `only_looks`.
    """
    statement = _FOUND_BY_CHECKPOINT if only_looks else _LOCKED_BY_CHECKPOINT
    found = execute_for_caller(session, caller, statement, {"checkpoint_id": checkpoint_id})
    if found is None or not caller.sees_project(found.Project.id):
        raise no_checkpoint(checkpoint_id)
    # Read behind the run's lock: what was seen before it may have been aborted while the lock was waited for.
    attempt, checkpoint, now = _behind(session, found.Run, fence, _Read.ID, checkpoint_id=checkpoint_id)
    if checkpoint is None:
        raise no_checkpoint(checkpoint_id)
    pusher = _checked(session, found.Run, attempt, fence, epoch, newest=not checkpoint.detached)
    if lock:
        lock_checkpoint(session, checkpoint)
    if not (only_looks and checkpoint.state == CheckpointState.COMMITTED):
        refuse_unless_pusher(checkpoint, fence)
    owner = pusher if checkpoint.attempt_id == pusher.id else session.get_one(Attempt, checkpoint.attempt_id)
    return Writing(found.Project, found.Run, owner, pusher, checkpoint, now)


def lock_checkpoint(session: Session, checkpoint: Checkpoint) -> None:
    """Takes the row FOR NO KEY UPDATE, as each change of its state does, and reads it anew. Rows that refer to it can
    still be inserted."""
    session.refresh(checkpoint, with_for_update={"key_share": True})


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


def refuse_unless_in_world(checkpoint: Checkpoint, ranks: Iterable[int]) -> None:
    for rank in ranks:
        if not 0 <= rank < checkpoint.world_size:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                f"There is no rank {rank} in a world of {checkpoint.world_size}. Begin the step with the right world "
                "size.",
                rank=rank,
                world_size=checkpoint.world_size,
            )


def keep_alive(session: Session, writing: Writing, settings: ServiceSettings) -> None:
    """Each call of a rank moves the deadline after which the reaper gives the checkpoint up, and its own heartbeat."""
    now, idle = writing.now, timedelta(seconds=settings.upload_idle_seconds)
    moved_from = now + idle * (1 - MOVED_AFTER)
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


def heartbeat_interval(settings: ServiceSettings) -> timedelta:
    """How often a job should say that it is alive. It misses ten before it is taken for lost: replies get lost, and
    machines are busy."""
    return timedelta(seconds=settings.lost_after_seconds) / 10


def beat(session: Session, attempt: Attempt, now: datetime, settings: ServiceSettings) -> None:
    """The attempt is alive, even if it was thought lost: a network may have been away and come back."""
    interval = heartbeat_interval(settings)
    # The clock may have been ahead at the last heartbeat, and have gone back since.
    due, ahead = now - interval * MOVED_AFTER, now + interval
    # The liveness monitor calls an attempt lost by a heartbeat that is much older.
    is_fresh = attempt.heartbeat_at is not None and due <= attempt.heartbeat_at <= ahead
    if is_fresh and attempt.outcome != AttemptOutcome.LOST:
        return
    # Another call that holds the row is most likely writing its own heartbeat: to wait for it would queue all ranks.
    # After a long silence it may be the reaper, which must be answered.
    silent_since = now - timedelta(seconds=settings.lost_after_seconds / 2)
    others_write = attempt.heartbeat_at is None or attempt.heartbeat_at > silent_since
    is_due = or_(Attempt.heartbeat_at.is_(None), Attempt.heartbeat_at < due, Attempt.heartbeat_at > ahead)
    free = select(Attempt.id).where(Attempt.id == attempt.id, is_due)
    free = free.with_for_update(key_share=True, skip_locked=others_write)
    session.execute(
        update(Attempt).where(Attempt.id == free.scalar_subquery()).values(heartbeat_at=now),
        execution_options={"synchronize_session": False},
    )
    revived = session.scalar(
        update(Attempt)
        .where(Attempt.id == attempt.id, Attempt.outcome == AttemptOutcome.LOST)
        .values(ended_at=None, outcome=None, outcome_detail=None)
        .returning(Attempt.id),
        execution_options={"synchronize_session": False},
    )
    if revived is not None:
        announce_revival(session, attempt, session.get_one(Run, attempt.run_id).project_id, _CALLED_AGAIN)


_CALLED_AGAIN = "it has called again"


def revive_locked(session: Session, attempt: Attempt, project_id: str) -> None:
    """As `beat`, of an attempt whose row the caller has locked; its heartbeat is the caller's to write."""
    if attempt.outcome == AttemptOutcome.LOST:
        attempt.ended_at = attempt.outcome = attempt.outcome_detail = None
        announce_revival(session, attempt, project_id, _CALLED_AGAIN)


def reached(session: Session, attempt: Attempt, step: int, *, locked: bool = False) -> None:
    """`attempt` is known to have come to `step`: it told so, or a save of that step was begun. The one place where
    `last_step`, the last step that it is known to have reached, moves; it never goes back. `locked`: the caller has
    locked the row, and the step is written with what else changes in it."""
    if attempt.last_step is not None and attempt.last_step >= step:
        return
    if locked:
        attempt.last_step = step
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


# The shards of a checkpoint's ranks, as rows. Each function takes the ranks of one call, and raises `invalid_request`
# for a rank outside the world.


def shards_of(session: Session, checkpoint: Checkpoint, ranks: Collection[int]) -> dict[int, Shard]:
    """By rank; a rank that has not called yet has none."""
    return _read_shards(session, _SHARDS, checkpoint, ranks)


def locked_shards(session: Session, checkpoint: Checkpoint, ranks: Collection[int]) -> dict[int, Shard]:
    """FOR UPDATE, in the order of the ranks: a late negotiation of the same rank must not add references while it is
    sealed. Made if absent."""
    shards = _read_shards(session, _LOCKED_SHARDS, checkpoint, ranks)
    if absent := sorted(set(ranks) - shards.keys()):
        new_shards(session, checkpoint, absent)  # or another call has made them
        shards |= _read_shards(session, _LOCKED_SHARDS, checkpoint, absent)
    return shards


_SHARDS = (
    select(Shard)
    .where(Shard.checkpoint_id == bindparam("checkpoint_id"), Shard.rank.in_(bindparam("ranks", expanding=True)))
    .order_by(Shard.rank)
)
_LOCKED_SHARDS = _SHARDS.with_for_update()


def _read_shards(
    session: Session, statement: Select[Shard], checkpoint: Checkpoint, ranks: Collection[int]
) -> dict[int, Shard]:
    refuse_unless_in_world(checkpoint, ranks)
    named = {"checkpoint_id": checkpoint.id, "ranks": sorted(ranks)}
    return {shard.rank: shard for shard in session.execute(statement, named, execution_options=_ANEW).scalars()}


def new_shards(session: Session, checkpoint: Checkpoint, ranks: Collection[int]) -> dict[int, int]:
    """The ids by rank; without those that another call has made."""
    refuse_unless_in_world(checkpoint, ranks)
    rows = [
        {
            "checkpoint_id": checkpoint.id,
            "rank": rank,
            "state": ShardState.OPEN,
            "logical_bytes": 0,
            "uploaded_bytes": 0,
            "components": {},
            "finite": True,
        }
        for rank in sorted(ranks)
    ]
    return {made.rank: made.id for made in insert_new(session, Shard, rows, Shard.rank, Shard.id)}
