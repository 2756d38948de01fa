"""Deadlines leave out the service's own downtime and jumps of the clock (protocol rule 31).

While the service was away no rank could call, so silence meant nothing. The row in `controllers` says when the last
round was; if that is far longer ago than the pause between two rounds, all deadlines move by the gap instead. Workers
may go on while no process serves: their rounds reap nothing, and are not counted.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState
from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.processes import SILENT_AFTER, last_served_at
from holdfast_service.catalog.tables import Attempt, Checkpoint
from holdfast_service.catalog.unheard import REAPER, unheard
from holdfast_service.clock import database_now
from holdfast_service.settings import ServiceSettings

NAME = REAPER
_SHORTEST_GAP = timedelta(seconds=60)
_ROUNDS = 5


def leave_out_downtime(session: Session, settings: ServiceSettings) -> timedelta | None:
    """Notes this round and returns by how much the deadlines were moved; zero in the ordinary case. None while no
    process serves.

    A clock that went back moves nothing: deadlines are further away then, which is safe.
    """
    now = database_now(session)
    insert_absent(session, Controller, [{"name": NAME, "ticked_at": now}])
    row = session.execute(select(Controller).where(Controller.name == NAME).with_for_update()).scalar_one()
    served_at = last_served_at(session)
    if served_at is not None and now - served_at > SILENT_AFTER:
        row.ticked_at = min(row.ticked_at, served_at)
        return None
    gap = now - row.ticked_at
    row.ticked_at = now
    if gap <= max(_SHORTEST_GAP, timedelta(seconds=settings.controller_interval_seconds) * _ROUNDS):
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
        .where(or_(Attempt.ended_at.is_(None), unheard(now - gap)))
        .order_by(Attempt.id)
        .with_for_update()
    ):
        # Its last heartbeat stays what it was: how far a job came is counted from it. A fenced one is waited for since
        # it was fenced.
        last_sign = attempt.ended_at or attempt.heartbeat_at or attempt.opened_at
        silent_since = max(last_sign, attempt.excused_until or attempt.opened_at)
        attempt.excused_until = min(now, silent_since + gap)
