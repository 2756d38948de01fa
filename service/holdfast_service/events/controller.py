"""The controller `events`: numbers events that nobody has asked for yet, and forgets old ones."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.events import EventRow
from holdfast_service.events.numbering import AT_ONCE, forget_some, number_new, unnumbered
from holdfast_service.settings import ServiceSettings
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

NAME = "events"


def reconcile(context: ServiceContext) -> ReconcileReport:
    """One pass. Both halves go on where an earlier one was killed."""
    number_new(context.database)
    older_than = timedelta(days=context.settings.keep_events_days)
    with context.database.read() as session:
        old = EventRow.happened_at < database_now(session) - older_than
        more = session.execute(select(exists().where(old))).scalar_one()
    done = 0
    while more and not context.stopping.is_set():
        forgotten = context.database.run(partial(forget_some, older_than=older_than))
        done, more = done + forgotten, forgotten == AT_ONCE
    return ReconcileReport(done=done)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """Events without a number."""
    del context
    return Backlog(due=unnumbered(session))


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop(NAME, settings.controller_interval_seconds, reconcile, backlog, sole=True),)
