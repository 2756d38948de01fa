"""One round of the reaper. May run in several processes at once, and twice: each step is settled under a row's lock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import AbortCause, AttemptOutcome, CheckpointState
from holdfast_service.catalog.aborting import abort
from holdfast_service.catalog.tables import Attempt, Checkpoint
from holdfast_service.catalog.views import seal_progress
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.reap.downtime import leave_out_downtime
from holdfast_service.reap.reasons import ended, silent

# An attempt that has missed so many heartbeats is lost. It comes back by calling again.
MISSED_HEARTBEATS = 10


@dataclass(frozen=True)
class ReapReport:
    aborted: tuple[str, ...] = ()
    lost_attempts: int = 0
    deadlines_moved_seconds: float = 0.0


def tick(context: ServiceContext) -> ReapReport:
    """After a gap nothing is reaped in this round: the ranks get the time to call again."""
    with context.database.transaction() as session:
        moved = leave_out_downtime(session, context.settings)
    if moved:
        return ReapReport(deadlines_moved_seconds=moved.total_seconds())
    with context.database.transaction() as session:
        lost = _mark_lost(session, context)
    with context.database.read() as session:
        due = _due(session, database_now(session))
    aborted = tuple(checkpoint_id for checkpoint_id in due if _give_up(context, checkpoint_id))
    return ReapReport(aborted, lost)


def _mark_lost(session: Session, context: ServiceContext) -> int:
    now = database_now(session)
    seconds = context.settings.heartbeat_interval_seconds * MISSED_HEARTBEATS
    silent_since = now - timedelta(seconds=seconds)
    lost = session.scalars(
        update(Attempt)
        .where(Attempt.ended_at.is_(None), func.coalesce(Attempt.heartbeat_at, Attempt.opened_at) < silent_since)
        .values(ended_at=now, outcome=AttemptOutcome.LOST, outcome_detail=f"no heartbeat for {seconds:.0f} seconds")
        .returning(Attempt.id),
        execution_options={"synchronize_session": False},
    )
    return len(lost.all())


def _due(session: Session, now: datetime) -> list[str]:
    return list(
        session.scalars(
            select(Checkpoint.id)
            .join(Attempt, Attempt.id == Checkpoint.attempt_id)
            .where(
                Checkpoint.state == CheckpointState.UPLOADING,
                # A late save outlives the attempts that staged and pushed it: only its own silence ends it.
                or_(Checkpoint.deadline_at <= now, Attempt.ended_at.is_not(None) & Checkpoint.pushed_by.is_(None)),
            )
            .order_by(Checkpoint.id)
        )
    )


def _give_up(context: ServiceContext, checkpoint_id: str) -> bool:
    """Looks again under the lock: a rank may have called, sealed or committed meanwhile."""
    with context.database.transaction() as session:
        checkpoint = session.execute(
            select(Checkpoint).where(Checkpoint.id == checkpoint_id).with_for_update(skip_locked=True)
        ).scalar_one_or_none()
        if checkpoint is None or checkpoint.state != CheckpointState.UPLOADING:
            return False
        now = database_now(session)
        attempt = session.execute(select(Attempt).where(Attempt.id == checkpoint.attempt_id)).scalar_one()
        missing = seal_progress(session, [checkpoint])[checkpoint.id].missing_ranks
        if attempt.ended_at is not None and checkpoint.pushed_by is None:
            # A lost attempt was only silent: it may be cut off, and comes back by calling again.
            lost = attempt.outcome == AttemptOutcome.LOST
            cause = AbortCause.SILENT if lost else AbortCause.ATTEMPT_ENDED
            abort(checkpoint, ended(attempt.number, attempt.outcome), now, cause=cause, rank=missing[0])
        elif checkpoint.deadline_at <= now:
            reason = silent(missing, context.settings.upload_idle_seconds)
            abort(checkpoint, reason, now, cause=AbortCause.SILENT, rank=missing[0])
        else:
            return False
    context.notifier.notify(checkpoint_id)
    return True
