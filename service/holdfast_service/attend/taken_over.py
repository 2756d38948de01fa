"""A fenced attempt that has never called again was lost before it was fenced, and nobody had noticed yet.

At the takeover nobody knows whether the older one is alive: a job that was killed looks for a while like one that is
between two heartbeats. So it is fenced first; one that calls later was alive, and one that stays silent was lost.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import AttemptOutcome
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.tables import Attempt, Run
from holdfast_service.catalog.unheard import heard_until, unheard
from holdfast_service.clock import database_now
from holdfast_service.settings import ServiceSettings

_HEARTBEATS = 3
"""So many a living job would have sent meanwhile, and have been refused."""


def to_settle(session: Session, settings: ServiceSettings) -> ColumnElement[bool]:
    """Over `attempts`."""
    silent_since = heard_until(session, database_now(session)) - timedelta(
        seconds=settings.heartbeat_interval_seconds * _HEARTBEATS
    )
    return and_(
        unheard(silent_since),
        Attempt.ended_at <= silent_since,
        or_(Attempt.excused_until.is_(None), Attempt.excused_until <= silent_since),
    )


def settle(session: Session, actor: Actor, settings: ServiceSettings) -> int:
    """How many were lost. Should one call later all the same, `attempts/refused.py` corrects it."""
    rows = session.execute(
        select(Attempt, Run.project_id)
        .join(Run, Run.id == Attempt.run_id)
        .where(to_settle(session, settings))
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
