"""The controller `liveness`: attempts that live and stand still, and fenced ones that were lost before.

Only the job's own words are compared, its last heartbeat with its last step: neither an unavailable service nor a clock
that jumps makes a stalled job of one that trains. A wholly silent attempt is the reaper's, which notes when the service
itself was unavailable.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import Doing
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import Attempt, Run
from holdfast_service.liveness.lost_attempts import fenced_and_silent, settle_fenced
from holdfast_service.work.report import Backlog, ReconcileReport

USUAL_STEPS = 20
"""A step may take so many times as long as usual: for an evaluation, a compilation, a slow file system."""
_LONGEST_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class StepRate:
    heartbeat_at: datetime | None
    progressed_at: datetime | None
    """The last sign of the training thread; None for a job that does not call step()."""
    doing: Doing | None
    steps_per_second: float | None


def stalled_since(rate: StepRate, *, stall_seconds: float) -> datetime | None:
    """Since when it makes no progress; None while nothing is known to be wrong. Saves and restores have their own
    time-outs."""
    if rate.heartbeat_at is None or rate.progressed_at is None or rate.doing is not Doing.TRAINING:
        return None
    usual = USUAL_STEPS / rate.steps_per_second if rate.steps_per_second else 0.0
    longest = timedelta(seconds=max(stall_seconds, min(usual, _LONGEST_SECONDS)))
    return rate.progressed_at if rate.heartbeat_at - rate.progressed_at > longest else None


NAME = "liveness"
_ACTOR = Actor.controller(NAME)


@dataclass(frozen=True, kw_only=True)
class LivenessReport(ReconcileReport):
    """`stalled` have come to a stop in this pass, `going_on` go on again, `lost` were dead when they were fenced."""

    stalled: int = 0
    going_on: int = 0
    lost: int = 0


def reconcile(context: ServiceContext) -> LivenessReport:
    """One pass: which living attempts have come to a stop, which go on again, and which fenced ones were dead already.
    May run in several processes at once, and twice: each row is changed only as long as it is as it was seen."""
    lost = stalled = going_on = 0
    with context.database.read() as session:
        due = backlog(session, context).due
        seen = session.execute(
            select(Attempt, Run.project_id).join(Run, Run.id == Attempt.run_id).where(_living()).order_by(Attempt.id)
        ).all()
    if due:
        with context.database.transaction() as session:
            lost = settle_fenced(session, _ACTOR, context.settings)
    for attempt, project_id in seen:
        since = _stalled_since(attempt, context.settings.stall_seconds)
        if (since is None) == (attempt.stalled_at is None):
            continue
        with context.database.transaction() as session:
            if not _mark(session, attempt, project_id, since):
                continue
        stalled, going_on = stalled + (since is not None), going_on + (since is None)
    return LivenessReport(done=stalled + going_on + lost, stalled=stalled, going_on=going_on, lost=lost)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """Fenced attempts that were silent since; each pass checks whether a living one makes progress."""
    due, oldest = session.execute(
        select(func.count(), func.min(Attempt.ended_at)).where(fenced_and_silent(session, context.settings))
    ).one()
    return Backlog(due, oldest_due_at=oldest)


def _living() -> ColumnElement[bool]:
    return Attempt.ended_at.is_(None) & Attempt.progressed_at.is_not(None)


def _stalled_since(attempt: Attempt, stall_seconds: float) -> datetime | None:
    rate = StepRate(
        heartbeat_at=attempt.heartbeat_at,
        progressed_at=attempt.progressed_at,
        doing=None if attempt.doing is None else Doing(attempt.doing),
        steps_per_second=attempt.steps_per_second,
    )
    return stalled_since(rate, stall_seconds=stall_seconds)


def _mark(session: Session, attempt: Attempt, project_id: str, since: datetime | None) -> bool:
    """False if a heartbeat, an end or another process has come in between."""
    changed = session.scalar(
        update(Attempt)
        .where(
            Attempt.id == attempt.id,
            Attempt.ended_at.is_(None),
            Attempt.progressed_at == attempt.progressed_at,
            Attempt.stalled_at.is_(None) if attempt.stalled_at is None else Attempt.stalled_at == attempt.stalled_at,
        )
        .values(stalled_at=since)
        .returning(Attempt.id),
        execution_options={"synchronize_session": False},
    )
    if changed is None:
        return False
    step = "no step" if attempt.last_step is None else f"step {attempt.last_step}"
    reason = f"alive, and nothing after {step} since {since:%Y-%m-%d %H:%M:%S} UTC" if since else f"goes on at {step}"
    record_event(
        session,
        _ACTOR,
        "attempt.stalled" if since else "attempt.goes_on",
        project_id=project_id,
        run_id=attempt.run_id,
        reason=reason,
        after={"attempt": attempt.number, "step": attempt.last_step},
    )
    return True
