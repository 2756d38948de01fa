"""Fenced attempts that may have been dead before, and until when one that lives could have said so.

attempts/open.py fences  ->  reap/downtime.py excuses what could not be heard  ->  attend/taken_over.py settles
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, or_, select, text
from sqlalchemy.orm import Session

from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.processes import last_served_at
from holdfast_service.catalog.tables import UNHEARD, Attempt

REAPER = "reap"
_FORGOTTEN_AFTER = timedelta(days=1)
"""What was fenced before attempts told of themselves stays as it was."""


def unheard(by: datetime) -> ColumnElement[bool]:
    """Over `attempts`: fenced, or excused, at most a day before `by`, and not heard of since."""
    since = by - _FORGOTTEN_AFTER
    return and_(text(UNHEARD), or_(Attempt.ended_at > since, Attempt.excused_until > since))


def heard_until(session: Session, now: datetime) -> datetime:
    """Silence counts until then: while no process served nobody could call, and a gap that the reaper has not seen yet
    is not excused yet."""
    reaped_at = session.scalar(select(Controller.ticked_at).where(Controller.name == REAPER))
    return min(moment for moment in (now, reaped_at, last_served_at(session)) if moment is not None)
