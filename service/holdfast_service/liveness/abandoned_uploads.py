"""The controller `reap`: gives up the uploads that no attempt works on any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import AbortCause, AttemptOutcome, CheckpointState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Attempt, Checkpoint, Run
from holdfast_service.db.tables.operations import Controller
from holdfast_service.liveness.lost_attempts import mark_lost
from holdfast_service.runs.views import MISSING_RANKS_SHOWN, ranks_not_sealed
from holdfast_service.settings import ServiceSettings
from holdfast_service.training.abort import abort
from holdfast_service.training.fencing import DRAIN_SECONDS, MOVED_AFTER, REAPER, is_silent
from holdfast_service.work.processes import SILENT_AFTER, last_served_at
from holdfast_service.work.report import Backlog, ReconcileReport


def silent(missing_ranks: Sequence[int], idle_seconds: int) -> str:
    """Why the reaper gave a checkpoint up, in words for people. Pure. `missing_ranks`: the first MISSING_RANKS_SHOWN
    that have not sealed; none, where the last seal was not counted."""
    if not missing_ranks:
        return f"every rank has sealed and it was not committed, and no rank has called for {idle_seconds} seconds"
    more = ", …" if len(missing_ranks) == MISSING_RANKS_SHOWN else ""
    who = f"rank{'s' if len(missing_ranks) > 1 else ''} {', '.join(map(str, missing_ranks))}{more}"
    return f"{who} did not seal, and no rank has called for {idle_seconds} seconds"


def ended(attempt: int, outcome: str | None) -> str:
    return f"attempt {attempt} has ended ({outcome}) without completing it"


NAME = REAPER
_SHORTEST_GAP = timedelta(seconds=60)
_ROUNDS = 5


def is_downtime(gap: timedelta, settings: ServiceSettings) -> bool:
    """Whether `gap`, the time between two passes, is longer than any pause that the reaper makes by itself. Pure."""
    return gap > max(_SHORTEST_GAP, timedelta(seconds=settings.controller_interval_seconds) * _ROUNDS)


def leave_out_downtime(session: Session, settings: ServiceSettings) -> timedelta | None:
    """Notes this pass, moves the deadlines by the service's own downtime and jumps of the clock, and returns by how
    much; zero in the ordinary case. None while no process serves (rule database-clock).

    While the service was unavailable no rank could call, and silence meant nothing. The row in `controllers` says when
    the last pass was; if that is far longer ago than the pause between two passes, all deadlines move by the gap
    instead. Workers may go on while no process serves: their passes reap nothing, and are not counted. A clock that
    went back moves nothing: deadlines are further away then, which is safe.
    """
    now = database_now(session)
    insert_absent(session, Controller, [{"name": NAME, "reconciled_at": now}])
    row = session.execute(select(Controller).where(Controller.name == NAME).with_for_update()).scalar_one()
    served_at = last_served_at(session)
    if served_at is not None and now - served_at > SILENT_AFTER:
        row.reconciled_at = min(row.reconciled_at, served_at)
        return None
    gap = now - row.reconciled_at
    row.reconciled_at = now
    if not is_downtime(gap, settings):
        return timedelta()
    _move(session, gap, now)
    return gap


def _move(session: Session, gap: timedelta, now: datetime) -> None:
    """In Python: the two databases have no common arithmetic on times, and there are few of these rows."""
    for checkpoint in session.scalars(
        select(Checkpoint)
        .where(Checkpoint.state == CheckpointState.UPLOADING)
        .order_by(Checkpoint.id)
        .with_for_update()
    ):
        checkpoint.deadline_at += gap
    for attempt in session.scalars(
        select(Attempt)
        .where(or_(Attempt.ended_at.is_(None), is_silent(now - gap)))
        .order_by(Attempt.id)
        .with_for_update()
    ):
        # Its last heartbeat stays what it was: how far a job came is counted from it. A fenced one is waited for since
        # it was fenced.
        last_sign = attempt.ended_at or attempt.heartbeat_at or attempt.opened_at
        silent_since = max(last_sign, attempt.excused_until or attempt.opened_at)
        attempt.excused_until = min(now, silent_since + gap)


@dataclass(frozen=True, kw_only=True)
class ReapReport(ReconcileReport):
    aborted: tuple[str, ...] = ()
    lost_attempts: int = 0
    deadlines_moved_seconds: float = 0.0


def reconcile(context: ServiceContext) -> ReapReport:
    """One pass of the reaper. May run in several processes at once, and twice: each step is settled under a row's lock.
    After a gap nothing is reaped in this pass: the ranks get the time to call again."""
    with context.database.transaction() as session:
        moved = leave_out_downtime(session, context.settings)
    if moved is None:
        return ReapReport(error="No process serves, so no rank can call: nothing is given up meanwhile.")
    if moved:
        return ReapReport(deadlines_moved_seconds=moved.total_seconds())
    with context.database.transaction() as session:
        lost = mark_lost(session, Actor.controller(NAME), context.settings)
    with context.database.read() as session:
        due = _due(session, context.settings)
    aborted = tuple(checkpoint_id for checkpoint_id in due if _give_up(context, checkpoint_id))
    return ReapReport(done=lost + len(aborted), aborted=aborted, lost_attempts=lost)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """Checkpoints that are to be given up, by their deadlines."""
    due, oldest = session.execute(
        select(func.count(), func.min(Checkpoint.deadline_at))
        .join(Attempt, Attempt.id == Checkpoint.attempt_id)
        .where(_is_due(database_now(session), context.settings))
    ).one()
    return Backlog(due, oldest_due_at=oldest)


def _due(session: Session, settings: ServiceSettings) -> list[str]:
    return list(
        session.scalars(
            select(Checkpoint.id)
            .join(Attempt, Attempt.id == Checkpoint.attempt_id)
            .where(_is_due(database_now(session), settings))
            .order_by(Checkpoint.deadline_at, Checkpoint.id)
        )
    )


def _is_due(now: datetime, settings: ServiceSettings) -> ColumnElement[bool]:
    """Over `checkpoints` with their `attempts`."""
    return and_(
        Checkpoint.state == CheckpointState.UPLOADING,
        # A late save outlives the attempts that staged and pushed it: only its own silence ends it.
        or_(Checkpoint.deadline_at <= now, _is_over(now, settings) & Checkpoint.pushed_by.is_(None)),
    )


def _is_over(now: datetime, settings: ServiceSettings) -> ColumnElement[bool]:
    """Over `checkpoints` with their `attempts`: nobody writes it any more. A job that told how it ended may have left
    it to the agent of a node, which calls as long as it works. A lost attempt was silent for longer already."""
    drain, idle = timedelta(seconds=DRAIN_SECONDS), timedelta(seconds=settings.upload_idle_seconds)
    called = now - drain + idle * (1 - MOVED_AFTER)
    drained = and_(Attempt.ended_at <= now - drain, Checkpoint.deadline_at <= called)
    gone = Attempt.outcome.in_((AttemptOutcome.LOST, AttemptOutcome.FENCED))
    return and_(Attempt.ended_at.is_not(None), or_(gone, drained))


def _give_up(context: ServiceContext, checkpoint_id: str) -> bool:
    """Looks again under the lock: a rank may have called, sealed or committed meanwhile."""
    with context.database.transaction() as session:
        checkpoint = session.execute(
            select(Checkpoint).where(Checkpoint.id == checkpoint_id).with_for_update(skip_locked=True)
        ).scalar_one_or_none()
        if checkpoint is None or checkpoint.state != CheckpointState.UPLOADING:
            return False
        now = database_now(session)
        attempt, over = session.execute(
            select(Attempt, _is_over(now, context.settings))
            .join(Checkpoint, Checkpoint.attempt_id == Attempt.id)
            .where(Checkpoint.id == checkpoint.id)
        ).one()
        missing = ranks_not_sealed(session, checkpoint, of_all=True)
        blamed = missing[0] if missing else None
        if over and checkpoint.pushed_by is None:
            # A lost attempt was only silent: it may be cut off, and comes back by calling again.
            lost = attempt.outcome == AttemptOutcome.LOST
            cause = AbortCause.SILENT if lost else AbortCause.ATTEMPT_ENDED
            abort(session, checkpoint, ended(attempt.number, attempt.outcome), now, cause=cause, rank=blamed)
        elif checkpoint.deadline_at <= now:
            reason = silent(missing, context.settings.upload_idle_seconds)
            abort(session, checkpoint, reason, now, cause=AbortCause.SILENT, rank=blamed)
        else:
            return False
        record_event(
            session,
            Actor.controller(NAME),
            "checkpoint.abort",
            project_id=session.execute(select(Run.project_id).where(Run.id == checkpoint.run_id)).scalar_one(),
            run_id=checkpoint.run_id,
            checkpoint_id=checkpoint.id,
            reason=checkpoint.abort_reason,
        )
    context.notifier.notify(checkpoint_id)
    return True
