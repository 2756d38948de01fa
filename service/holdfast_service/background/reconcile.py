"""A pass of a controller: whether it begins, and what it did."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, case, null, or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.base import text_to_keep
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.text import without_secrets
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.operations import Controller, Worker
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import StoreError
from holdfast_service.work.report import ControllerLoop, ReconcileReport


def find_loop(loops: Sequence[ControllerLoop], name: str) -> ControllerLoop:
    """Raises `controller_not_found`."""
    found = next((each for each in loops if each.name == name), None)
    if found is None:
        names = ", ".join(sorted(each.name for each in loops))
        raise ProblemError(
            ProblemCode.CONTROLLER_NOT_FOUND, f"There is no controller {name[:50]!r}. Take one of these: {names}."
        )
    return found


def locked_row(session: Session, name: str) -> Controller:
    insert_absent(session, Controller, [{"name": name, "reconciled_at": database_now(session)}])
    return session.execute(select(Controller).where(Controller.name == name).with_for_update()).scalar_one()


@dataclass(frozen=True)
class Begun:
    """`lease_token`: of the controller's lease, None for a pass that needs none. `requested_at`: the request that it
    answers. `noted_lately`: a pass was written down not long ago."""

    name: str
    lease_token: str | None
    requested_at: datetime | None
    noted_lately: bool


def begin_pass(context: ServiceContext, each: ControllerLoop, *, due: bool) -> Begun | None:
    """Whether a pass of a controller begins, here and now; None if not. The controller's row in the catalog says so to
    all processes. `due`: this process's pause between two passes is over.

    A paused controller begins none. A requested pass begins at once, in one process: the one whose conditional update
    takes the lease. The request stays until that pass is over: another process that finds the lease run out repeats a
    killed one.
    """
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
        return Begun(each.name, None, None, _noted_lately(row, now))
    interval = timedelta(seconds=each.interval_seconds)
    # What began later than a pass from now did so by a clock that was ahead: to wait for it might stop work for a day.
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
        insert_absent(session, Controller, [{"name": name, "reconciled_at": now}])
        return now, session.execute(query).scalar_one()


def _take_lease(
    context: ServiceContext, name: str, now: datetime, row: Controller, still: ColumnElement[bool]
) -> Begun | None:
    """None if another process was first, or has it."""
    if lease.is_taken(row, now):
        return None
    wanted = (Controller.name == name, Controller.paused_at.is_(None), still)
    with context.database.transaction() as session:
        seconds = context.settings.lease_seconds
        token = lease.claim(session, Controller, *wanted, seconds=seconds, began_at=now)
    return None if token is None else Begun(name, token, row.run_requested_at, noted_lately=False)


# Passes without work are many, and each would be a write of the database.
_IDLE_NOTED_EVERY = timedelta(minutes=5)
_MOST_LETTERS = 2000
_MOST_ITEMS = 20
_UNSYNCHRONIZED = {"synchronize_session": False}


def report_pass(context: ServiceContext, begun: Begun, report: ReconcileReport, seconds: float) -> None:
    """Writes down what a pass did, on the controller's row and on that of this process, and gives its lease back. A
    pass that found nothing leaves the report of the last one that did."""
    if report.idle and begun.noted_lately:
        return
    with context.database.transaction() as session:
        values: dict[str, Any] = {"ended_at": database_now(session)}
        if not report.idle:
            values |= {
                "report": report_document(report),
                "report_at": values["ended_at"],
                "pass_seconds": seconds,
                "done": Controller.done + report.done,
                "failed": Controller.failed + report.failed,
            }
        if report.error is not None:
            values |= {"error": text_to_keep(report.error, _MOST_LETTERS), "error_at": values["ended_at"]}
        session.execute(
            update(Controller).where(Controller.name == begun.name).values(values), execution_options=_UNSYNCHRONIZED
        )
        if begun.lease_token is not None:
            _give_lease_back(session, begun, begun.lease_token)
        if report.done:
            _add_to_this_process(session, context.process_id, begun.name, report.done)


def report_document(report: ReconcileReport) -> dict[str, Any]:
    """As JSON; of a long list the beginning, and how many more there are."""
    return {each.name: _shown(getattr(report, each.name)) for each in fields(report)}


def _shown(value: Any) -> Any:
    if isinstance(value, tuple | list):
        more = [f"… and {len(value) - _MOST_ITEMS} more"] if len(value) > _MOST_ITEMS else []
        return [*(_shown(item) for item in value[:_MOST_ITEMS]), *more]
    if isinstance(value, float) and math.isfinite(value):
        return value
    # What is neither is shown as text: a report that JSON cannot say must not keep its pass from being noted.
    return value if value is None or isinstance(value, int) else text_to_keep(str(value), _MOST_LETTERS)


def _noted_lately(row: Controller, now: datetime) -> bool:
    return row.ended_at is not None and now - row.ended_at < _IDLE_NOTED_EVERY


def _give_lease_back(session: Session, begun: Begun, token: str) -> None:
    """A request that came while the pass was under way wants another one."""
    values: dict[str, Any] = {}
    if begun.requested_at is not None:
        values = {
            "run_answered_at": begun.requested_at,
            "run_requested_at": case(
                (Controller.run_requested_at == begun.requested_at, null()), else_=Controller.run_requested_at
            ),
        }
    lease.give_back(session, Controller, token, Controller.name == begun.name, **values)


def _add_to_this_process(session: Session, process_id: str, name: str, done: int) -> None:
    row = session.scalar(select(Worker).where(Worker.id == process_id).with_for_update())
    if row is not None:
        row.done = {**row.done, name: row.done.get(name, 0) + done}


_log = structlog.get_logger("holdfast.background")


def run_pass(
    context: ServiceContext,
    each: ControllerLoop,
    *,
    due: bool = True,
    keeping: Callable[[str | None], AbstractContextManager[object]] = nullcontext,
) -> ReconcileReport | None:
    """One pass of a controller: begin, reconcile, report; None if no pass began. Whatever a reconcile raises ends its
    pass and nothing else. `keeping` renews the pass's lease meanwhile. Raises ProblemError if the database is
    unavailable."""
    begun = begin_pass(context, each, due=due)
    if begun is None:
        return None
    began = time.monotonic()
    with keeping(begun.lease_token):
        report = _reconcile(context, each)
    report_pass(context, begun, report, time.monotonic() - began)
    return report


def _reconcile(context: ServiceContext, each: ControllerLoop) -> ReconcileReport:
    try:
        report = each.reconcile(context)
    except (ProblemError, StoreError) as error:  # database or store are unavailable
        _log.warning("pass_failed", controller=each.name, error=str(error))
        return ReconcileReport(failed=1, error=without_secrets(str(error)))
    except Exception as error:
        _log.exception("pass_failed", controller=each.name)
        where = f"the log of {context.process_id} says where"
        return ReconcileReport(failed=1, error=f"A bug ({type(error).__name__}); {where}. Report it.")
    _log.debug("pass", controller=each.name, report=str(report))
    return report
