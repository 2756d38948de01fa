"""Attempts that fell silent: living ones, and fenced ones that were dead before they were fenced."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_protocol.states import AttemptOutcome
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Attempt, Run
from holdfast_service.events.announce import end_stalls
from holdfast_service.settings import ServiceSettings
from holdfast_service.training.fencing import heard_until, heartbeat_interval, is_silent


def mark_lost(session: Session, actor: Actor, settings: ServiceSettings) -> int:
    """How many fell silent. They come back by calling again."""
    now = database_now(session)
    seconds = settings.lost_after_seconds
    silent_since = now - timedelta(seconds=seconds)
    lost = session.scalars(
        update(Attempt)
        .where(
            Attempt.ended_at.is_(None),
            func.coalesce(Attempt.heartbeat_at, Attempt.opened_at) < silent_since,
            or_(
                func.coalesce(Attempt.excused_until, Attempt.opened_at) < silent_since,
                _is_to_come(Attempt.excused_until, now, settings),
            ),
        )
        .values(
            ended_at=now,
            outcome=AttemptOutcome.LOST,
            outcome_detail=f"not heard of for {seconds:g} seconds (HOLDFAST_LOST_AFTER_SECONDS)",
        )
        .returning(Attempt.id),
        execution_options={"synchronize_session": False},
    ).all()
    end_stalls(session, lost)
    _record_lost(session, actor, lost)
    return len(lost)


def _record_lost(session: Session, actor: Actor, attempt_ids: Sequence[int]) -> None:
    for number, detail, run_id, project_id in session.execute(
        select(Attempt.number, Attempt.outcome_detail, Run.id, Run.project_id)
        .join(Run, Run.id == Attempt.run_id)
        .where(Attempt.id.in_(attempt_ids))
        .order_by(Attempt.id)
    ):
        record_event(
            session,
            actor,
            "attempt.lost",
            project_id=project_id,
            run_id=run_id,
            reason=detail,
            after={"attempt": number},
        )


_HEARTBEATS = 3
"""So many a living job would have sent meanwhile, and have been refused."""


def fenced_and_silent(session: Session, settings: ServiceSettings) -> ColumnElement[bool]:
    """Over `attempts`."""
    now = database_now(session)
    silent_since = heard_until(session, now) - _HEARTBEATS * heartbeat_interval(settings)
    excused = Attempt.excused_until
    return and_(
        is_silent(silent_since),
        or_(Attempt.ended_at <= silent_since, _is_to_come(Attempt.ended_at, now, settings)),
        or_(excused.is_(None), excused <= silent_since, _is_to_come(excused, now, settings)),
    )


def _is_to_come(
    moment: InstrumentedAttribute[datetime | None], now: datetime, settings: ServiceSettings
) -> ColumnElement[bool]:
    """It was noted by a clock that was ahead and has gone back since, and says nothing. If an attempt is called lost
    for that, its next call corrects it. A heartbeat of that time is overwritten by the next one."""
    return moment > now + heartbeat_interval(settings)


def settle_fenced(session: Session, actor: Actor, settings: ServiceSettings) -> int:
    """How many fenced attempts were lost. One that has never called again was lost before it was fenced, and no pass
    had noticed yet. Should it call later all the same, `training/attempts.py` corrects it.

    At the takeover the service cannot tell whether the older one is alive: a killed job looks for a while like a job
    between two heartbeats. It is therefore fenced first; an attempt that calls later was alive, and a silent one was
    lost.
    """
    rows = session.execute(
        select(Attempt, Run.project_id)
        .join(Run, Run.id == Attempt.run_id)
        .where(fenced_and_silent(session, settings))
        .order_by(Attempt.id)
        .with_for_update(of=Attempt, skip_locked=True)
    ).all()
    for attempt, project_id in rows:
        attempt.outcome = AttemptOutcome.LOST.value
        last_sign_at = attempt.heartbeat_at or attempt.opened_at
        attempt.outcome_detail = (
            f"not heard of since {last_sign_at:%Y-%m-%d %H:%M:%S} UTC; attempt {attempt.number + 1} has taken over"
        )
        record_event(
            session,
            actor,
            "attempt.lost",
            project_id=project_id,
            run_id=attempt.run_id,
            reason=attempt.outcome_detail,
            after={"attempt": attempt.number},
        )
    return len(rows)
