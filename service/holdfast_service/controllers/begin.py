"""Whether a round of a controller begins, here and now. Its row in the catalog says so to all processes.

A paused controller begins none. A round that somebody has asked for begins at once, in one process: the one whose
conditional update takes the lease. The request stays until that round is over, so one that is killed is done again by
whoever finds the lease run out.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, or_, select, update

from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.rounds import Round
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext


@dataclass(frozen=True)
class Begun:
    """`lease_token`: of the controller's lease, None for a round that needs none. `requested_at`: the request that it
    answers. `noted_at`: when a round was last written down."""

    name: str
    lease_token: str | None
    requested_at: datetime | None
    noted_at: datetime | None


def begin_round(context: ServiceContext, each: Round, *, due: bool) -> Begun | None:
    """`due`: this process's pause between two rounds is over. None if no round begins."""
    now, row = _look(context, each.name)
    if row.paused_at is not None and not each.own:
        return None
    if row.run_requested_at is not None:
        taken = _take_lease(context, each.name, now, row, Controller.run_requested_at == row.run_requested_at)
        if taken is not None:
            return taken
    if not due:
        return None
    if not each.sole:
        return Begun(each.name, None, None, row.ended_at)
    interval = timedelta(seconds=each.interval_seconds)
    # What began later than a round from now did so by a clock that was ahead: to wait for it might stop work for a day.
    earliest, latest = now - interval, now + interval
    if row.began_at is not None and earliest < row.began_at <= latest:
        return None
    is_due = or_(Controller.began_at.is_(None), Controller.began_at <= earliest, Controller.began_at > latest)
    return _take_lease(context, each.name, now, row, is_due)


def _look(context: ServiceContext, name: str) -> tuple[datetime, Controller]:
    query = select(Controller).where(Controller.name == name)
    with context.database.read() as session:
        row = session.scalar(query)
        now = database_now(session)
    if row is not None:
        return now, row
    with context.database.transaction() as session:
        insert_absent(session, Controller, [{"name": name, "ticked_at": now}])
        return now, session.execute(query).scalar_one()


def _take_lease(
    context: ServiceContext, name: str, now: datetime, row: Controller, still: ColumnElement[bool]
) -> Begun | None:
    """None if somebody else was first, or has it."""
    if row.leased_until is not None and row.leased_until > now:
        return None
    token = secrets.token_hex(16)
    with context.database.transaction() as session:
        taken = session.scalar(
            update(Controller)
            .where(
                Controller.name == name,
                Controller.paused_at.is_(None),
                or_(Controller.leased_until.is_(None), Controller.leased_until <= now),
                still,
            )
            .values(
                lease_token=token,
                leased_until=database_now(session) + timedelta(seconds=context.settings.lease_seconds),
                began_at=now,
            )
            .returning(Controller.name),
            execution_options={"synchronize_session": False},
        )
    return None if taken is None else Begun(name, token, row.run_requested_at, row.ended_at)
