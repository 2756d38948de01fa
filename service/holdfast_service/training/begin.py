"""Begin a checkpoint, also a late one that a spool has kept, and answer the first offers of its ranks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import (
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointView,
    FirstOffer,
    RankNegotiated,
)
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AbortCause, AttemptOutcome, CheckpointState, Health, QuotaKind, Tier
from holdfast_protocol.text import counted
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run
from holdfast_service.errors import ProblemError
from holdfast_service.quotas.crossings import telling_refusals
from holdfast_service.quotas.limits import refuse_one_more
from holdfast_service.runs.views import attempt_numbered, current_checkpoint_view
from holdfast_service.stores.base import StoreError
from holdfast_service.training.abort import abort
from holdfast_service.training.fencing import (
    DRAIN_SECONDS,
    LIVE,
    Writing,
    keep_alive,
    lock_checkpoint,
    lock_run,
    pass_fence,
    reached,
    refuse_unless_pusher,
)
from holdfast_service.training.negotiate import Reservation, answers, check_offers, md5_needed, reserve

# Late saves: where a save that an attempt kept in its spool belongs once it is pushed (rule late-save-adoption).
#
# It belongs to the attempt that staged it, and is written by the one that pushes it. On the line it is as if it had
# been committed in time; that is allowed only while the run has not gone on without it. Afterwards it is a branch off
# the line: kept, and never `latest`.
#
# Two that act at once: the opening of an attempt holds the run's row alone, and aborts what is being pushed on the
# line. The newest attempt's own first begin needs no such order: a late save that has not seen it came before it.


@dataclass(frozen=True)
class LateSave:
    """`detached` says why it cannot be on the lineage any more; None: it can."""

    run: Run
    origin: Attempt
    pusher: Attempt
    detached: str | None


def place_late_save(
    session: Session, locked: tuple[Project, Run], request: BeginCheckpoint, epoch: int
) -> tuple[LateSave, datetime]:
    """With the database's clock. Raises `stale_attempt`, `attempt_not_found`, and `invalid_request` for a save of an
    attempt yet to come."""
    # A caller that accepts a branch needs no fence against newer attempts: a branch changes nothing that they were
    # told.
    fenced = pass_fence(session, locked, request, epoch, newest=not request.allow_detached)
    run, pusher = fenced.run, fenced.attempt
    assert request.origin_attempt is not None
    origin = attempt_numbered(session, run, request.origin_attempt)
    if origin.number > pusher.number:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"Attempt {pusher.number} cannot push a save of attempt {origin.number}, which is newer. Push it as the "
            f"newest attempt, {run.latest_attempt}.",
            origin_attempt=origin.number,
            latest_attempt=run.latest_attempt,
        )
    return LateSave(run, origin, pusher, _why_detached(session, run, origin, pusher)), fenced.now


def refuse_detached(late: LateSave, request: BeginCheckpoint) -> None:
    """Raises `detached_branch` unless the caller accepts one."""
    if late.detached is None or request.allow_detached:
        return
    raise ProblemError(
        ProblemCode.DETACHED_BRANCH,
        f"Step {request.step} of attempt {late.origin.number} comes too late: {late.detached}. It can be kept beside "
        "the line and restored by its name (allow_detached), but never be the latest.",
        origin_attempt=late.origin.number,
        step=request.step,
    )


def _why_detached(session: Session, run: Run, origin: Attempt, pusher: Attempt) -> str | None:
    if pusher.number != run.latest_attempt:
        return f"attempt {run.latest_attempt} has taken over this run"
    if origin.number == pusher.number:
        return None
    went_on = session.scalar(
        select(func.min(Attempt.number)).where(
            Attempt.run_id == run.id, Attempt.number > origin.number, Attempt.cut_at.is_not(None)
        )
    )
    if went_on is not None:
        return f"attempt {went_on} has made the run go on from elsewhere"
    begun = exists().where(Checkpoint.run_id == run.id, Checkpoint.attempt_number == pusher.number)
    if session.scalar(select(begun)):
        return f"attempt {pusher.number} has begun to save steps of its own"
    return None


# Begin a checkpoint. Any rank may be the first; the others find it (rule one-checkpoint-per-step).


def begin_checkpoint(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: BeginCheckpoint
) -> CheckpointView:
    """The checkpoint of this attempt and step, new or as it is; after an abort a new one. What an earlier save of the
    step has begun and not committed is aborted for it. A late save is its origin's.

    Raises `stale_attempt`, `checkpoint_conflict` if it was begun with another world size or kind, or by a later save
    of the step, or is being pushed by another attempt, `quota_exceeded` for a new one that the project's quota has no
    room for, and for a late save `detached_branch`, `attempt_not_found` and `invalid_request`.
    """

    def begun(session: Session) -> CheckpointView:
        writing = begin_in(session, context, caller, (project_name, run_name), request)
        has_begun(session, context, writing)
        return current_checkpoint_view(session, writing.project.name, writing.run.name, writing.checkpoint)

    with telling_refusals(context):
        return context.database.run(begun)


def begin_in(
    session: Session,
    context: ServiceContext,
    caller: Principal,
    run: tuple[str, str],
    request: BeginCheckpoint,
) -> Writing:
    """`begin_checkpoint` within a transaction. `run`: its project's name and its own. Repeatable. The caller ends with
    `has_begun`."""
    locked = lock_run(session, caller, *run)
    begin = _begin if request.origin_attempt is None else _begin_late
    writing = begin(session, context, locked, request)
    _refuse_if_different(writing.checkpoint, request)
    return writing


def begin_and_negotiate(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: BeginCheckpoint
) -> CheckpointBegun:
    """Begins a checkpoint and answers its ranks' first offers, in one transaction. Raises what `begin_checkpoint` does.
    An offer that is refused is no failure of the begin: each rank offers again in a call of its own, and hears why."""
    if request.offers:
        with suppress(ProblemError, StoreError):
            return _begun_with(request.offers, context, caller, (project_name, run_name), request)
    return CheckpointBegun(**dict(begin_checkpoint(context, caller, project_name, run_name, request)))


def _begun_with(
    offers: Sequence[FirstOffer],
    context: ServiceContext,
    caller: Principal,
    run: tuple[str, str],
    request: BeginCheckpoint,
) -> CheckpointBegun:
    for offer in offers:
        check_offers(offer.chunks, md5_needed=md5_needed(context.store.capabilities))
    offered = {offer.rank: offer.chunks for offer in offers}

    def begun(session: Session) -> tuple[CheckpointView, Reservation | None]:
        writing = begin_in(session, context, caller, run, request)
        uploading = writing.checkpoint.state == CheckpointState.UPLOADING
        reservation = reserve(session, context, writing, offered, first=True) if uploading else None
        has_begun(session, context, writing)
        return current_checkpoint_view(session, writing.project.name, writing.run.name, writing.checkpoint), reservation

    view, reservation = context.database.run(begun)
    if reservation is None:
        return CheckpointBegun(**dict(view))
    negotiated = [
        RankNegotiated(
            rank=offer.rank,
            chunks=answers(context, reservation, offer.rank, offer.chunks, offer.mount_proof),
            finished=[],
        )
        for offer in offers
    ]
    return CheckpointBegun(**dict(view), negotiated=negotiated)


def has_begun(session: Session, context: ServiceContext, writing: Writing) -> None:
    """The attempt lives, and has come to this step. Last in the transaction: a seal locks the checkpoint and then the
    attempt, and rows that refer to the checkpoint wait for it."""
    keep_alive(session, writing, context.settings)
    # Whatever becomes of the save: its state is that after this step. A job that is killed before its next heartbeat
    # has told so by this alone.
    reached(session, writing.attempt, writing.checkpoint.step)


def _begin(session: Session, context: ServiceContext, locked: tuple[Project, Run], request: BeginCheckpoint) -> Writing:
    fenced = pass_fence(session, locked, request, context.epoch, step=request.step)
    attempt = fenced.attempt
    checkpoint = _of_this_save(session, fenced.checkpoint, request, fenced.now)
    if checkpoint is None:
        _refuse_if_ended(session, attempt)
        checkpoint = _insert(
            session, context, locked[0], attempt, request, now=fenced.now, pushed_by=None, detached=False
        )
    return Writing(*locked, attempt, attempt, checkpoint, fenced.now)


def _begin_late(
    session: Session, context: ServiceContext, locked: tuple[Project, Run], request: BeginCheckpoint
) -> Writing:
    late, now = place_late_save(session, locked, request, context.epoch)
    # What is on the line comes first: it may have been committed in time, or be on its way since it still could.
    checkpoint = _of_this_save(session, _live(session, late.origin, request.step), request, now)
    detached = late.detached is not None
    if checkpoint is None and detached:
        beside = _live(session, late.origin, request.step, detached=True)
        checkpoint = _of_this_save(session, beside, request, now)
    if checkpoint is None:
        refuse_detached(late, request)
        pushed_by = late.pusher.number
        checkpoint = _insert(
            session, context, locked[0], late.origin, request, now=now, pushed_by=pushed_by, detached=detached
        )
    if checkpoint.state == CheckpointState.UPLOADING:
        refuse_unless_pusher(checkpoint, request)
    return Writing(*locked, late.origin, late.pusher, checkpoint, now)


def _live(session: Session, attempt: Attempt, step: int, *, detached: bool = False) -> Checkpoint | None:
    return session.scalar(
        select(Checkpoint).where(
            Checkpoint.run_id == attempt.run_id,
            Checkpoint.attempt_number == attempt.number,
            Checkpoint.step == step,
            Checkpoint.detached == detached,
            Checkpoint.state.in_(LIVE),
        )
    )


def _of_this_save(
    session: Session, checkpoint: Checkpoint | None, request: BeginCheckpoint, now: datetime
) -> Checkpoint | None:
    """`checkpoint`, unless an earlier save has begun it: then it is aborted. A rank goes on to the next save only once
    the one before is over for it, so nobody will complete that one. What is committed stays, and the seal compares the
    content. Raises `checkpoint_conflict` if a later save has begun the step, and for a late save that finds another one
    under way: who pushes has not given the others up, and they may be living ranks'.

    The abort is before the rest of the begin takes its locks (rule lock-order). Where that meets a negotiation of the
    earlier save, the database ends one of the two, and it is tried again."""
    number, ours = None if checkpoint is None else checkpoint.save_number, request.save_number
    if checkpoint is None or number is None or ours is None or ours == number:
        return checkpoint
    if checkpoint.state == CheckpointState.UPLOADING:
        lock_checkpoint(session, checkpoint)
    if checkpoint.state != CheckpointState.UPLOADING:
        return checkpoint if checkpoint.state == CheckpointState.COMMITTED else None
    if ours < number:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Save {number} of attempt {checkpoint.attempt_number} has begun step {request.step} anew, so its save "
            f"{ours} of that step cannot be completed any more. Go on with the next save.",
            checkpoint_id=checkpoint.id,
            save_number=number,
        )
    if request.origin_attempt is not None:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Save {number} of attempt {checkpoint.attempt_number} is under way at step {request.step}, and this is "
            f"save {ours} of that step. Push it again once the other one is committed, or was given up.",
            checkpoint_id=checkpoint.id,
            save_number=number,
        )
    reason = f"save {ours} of the attempt has begun this step anew, before all ranks had sealed their parts of {number}"
    abort(session, checkpoint, reason, now, cause=AbortCause.JOB)
    session.flush()
    return None


def _insert(
    session: Session,
    context: ServiceContext,
    project: Project,
    attempt: Attempt,
    request: BeginCheckpoint,
    *,
    now: datetime,
    pushed_by: int | None,
    detached: bool,
) -> Checkpoint:
    row = _new(context, attempt, request, now) | {"pushed_by": pushed_by, "detached": detached}
    checkpoint = None
    while checkpoint is None:
        insert_absent(session, Checkpoint, [row])
        # Inserted here, or by a rank that was faster: maybe for an earlier save, which is aborted then.
        checkpoint = _of_this_save(session, _live(session, attempt, request.step, detached=detached), request, now)
    if checkpoint.id == row["id"]:
        refuse_one_more(session, project, QuotaKind.CHECKPOINTS)
    return checkpoint


def _new(context: ServiceContext, attempt: Attempt, request: BeginCheckpoint, now: datetime) -> dict[str, object]:
    return {
        "id": f"ck_{uuid.uuid4().hex}",
        "run_id": attempt.run_id,
        "attempt_id": attempt.id,
        "attempt_number": attempt.number,
        "step": request.step,
        "save_number": request.save_number,
        "kind": request.kind,
        "world_size": request.world_size,
        "state": CheckpointState.UPLOADING,
        "health": Health.OK,
        "tier": Tier.HOT,
        "logical_bytes": 0,
        "chunk_bytes": 0,
        "uploaded_bytes": 0,
        "metrics": {},
        "labels": list(request.labels),
        "components": {},
        "version": 1,
        "created_at": now,
        "deadline_at": now + timedelta(seconds=context.settings.upload_idle_seconds),
    }


def _refuse_if_ended(session: Session, attempt: Attempt) -> None:
    """An attempt that said that it has ended begins nothing more. One that was only thought lost comes back, and one
    that crashed still begins what it had queued by then."""
    if attempt.outcome is None or attempt.outcome == AttemptOutcome.LOST:
        return
    assert attempt.ended_at is not None  # who sets the outcome sets both
    drains_until = attempt.ended_at + timedelta(seconds=DRAIN_SECONDS)
    if attempt.outcome == AttemptOutcome.FAILED and database_now(session) < drains_until:
        return
    raise ProblemError(
        ProblemCode.STALE_ATTEMPT,
        f"Attempt {attempt.number} has ended ({attempt.outcome}). Launch the job again to go on.",
        attempt=attempt.number,
        outcome=attempt.outcome,
    )


def _refuse_if_different(checkpoint: Checkpoint, request: BeginCheckpoint) -> None:
    if (checkpoint.world_size, checkpoint.kind) == (request.world_size, request.kind):
        return
    raise ProblemError(
        ProblemCode.CHECKPOINT_CONFLICT,
        f"Step {request.step} was begun as {checkpoint.kind} by {counted(checkpoint.world_size, 'rank')}, and is now "
        f"begun as {request.kind} by {request.world_size}. All ranks must save the same step in the same way.",
        checkpoint_id=checkpoint.id,
        world_size=checkpoint.world_size,
        kind=checkpoint.kind,
    )
