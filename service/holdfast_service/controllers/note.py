"""Writes down what a round did, on the controller's row and on that of this process, and gives its lease back."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import timedelta
from typing import Any

from sqlalchemy import case, null, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.base import text_to_keep
from holdfast_service.catalog.custody_tables import Controller, Worker
from holdfast_service.catalog.rounds import RoundReport
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.controllers.begin import Begun

# Rounds without work are many, and each would be a write of the database.
_IDLE_NOTED_EVERY = timedelta(seconds=30)
_MOST_LETTERS = 2000
_MOST_ITEMS = 20
_UNSYNCHRONIZED = {"synchronize_session": False}


def note_round(context: ServiceContext, begun: Begun, report: RoundReport, seconds: float) -> None:
    """A round that found nothing leaves the report of the last one that did."""
    if report.idle and begun.lease_token is None and _noted_lately(context, begun):
        return
    with context.database.transaction() as session:
        values: dict[str, Any] = {"ended_at": database_now(session)}
        if not report.idle:
            values |= {
                "report": report_document(report),
                "report_at": values["ended_at"],
                "round_seconds": seconds,
                "done": Controller.done + report.done,
                "failed": Controller.failed + report.failed,
            }
        if report.error is not None:
            values |= {"error": text_to_keep(report.error, _MOST_LETTERS), "error_at": values["ended_at"]}
        session.execute(
            update(Controller).where(Controller.name == begun.name).values(values), execution_options=_UNSYNCHRONIZED
        )
        if begun.lease_token is not None:
            _give_lease_back(session, begun)
        if report.done:
            _add_to_this_process(session, context.process_id, begun.name, report.done)


def report_document(report: RoundReport) -> dict[str, Any]:
    """As JSON; of a long list the beginning, and how many more there are."""
    return {each.name: _shown(getattr(report, each.name)) for each in fields(report)}


def _shown(value: Any) -> Any:
    if isinstance(value, tuple | list):
        more = [f"… and {len(value) - _MOST_ITEMS} more"] if len(value) > _MOST_ITEMS else []
        return [*(_shown(item) for item in value[:_MOST_ITEMS]), *more]
    if isinstance(value, float) and math.isfinite(value):
        return value
    # What is neither is shown as text: a report that JSON cannot say must not keep its round from being noted.
    return value if value is None or isinstance(value, int) else text_to_keep(str(value), _MOST_LETTERS)


def _noted_lately(context: ServiceContext, begun: Begun) -> bool:
    if begun.noted_at is None:
        return False
    with context.database.read() as session:
        return database_now(session) - begun.noted_at < _IDLE_NOTED_EVERY


def _give_lease_back(session: Session, begun: Begun) -> None:
    """A request that came while the round was under way wants another one."""
    values: dict[str, Any] = {"lease_token": None, "leased_until": None}
    if begun.requested_at is not None:
        values |= {
            "run_answered_at": begun.requested_at,
            "run_requested_at": case(
                (Controller.run_requested_at == begun.requested_at, null()), else_=Controller.run_requested_at
            ),
        }
    session.execute(
        update(Controller)
        .where(Controller.name == begun.name, Controller.lease_token == begun.lease_token)
        .values(values),
        execution_options=_UNSYNCHRONIZED,
    )


def _add_to_this_process(session: Session, process_id: str, name: str, done: int) -> None:
    row = session.scalar(select(Worker).where(Worker.id == process_id).with_for_update())
    if row is not None:
        row.done = {**row.done, name: row.done.get(name, 0) + done}
