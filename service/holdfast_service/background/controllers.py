"""Controllers and processes as people see them, and what a person may tell a controller: pause, resume, run now.

Each is an audit event, and twice is fine. A pause lets passes under way end, and begins none. A run is done once, by
whichever process is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import ControllerView, PauseController, WorkerView
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.background.reconcile import find_loop, locked_row
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.operations import Controller, Worker
from holdfast_service.errors import ProblemError
from holdfast_service.work.processes import SILENT_AFTER
from holdfast_service.work.report import ControllerLoop


def list_controllers(context: ServiceContext, loops: Sequence[ControllerLoop]) -> list[ControllerView]:
    """How each controller is doing, for people: its row, and how much work waits for it now."""
    with context.database.read() as session:
        return controller_views(session, context, loops)


def show_controller(context: ServiceContext, loops: Sequence[ControllerLoop], name: str) -> ControllerView:
    """Raises `controller_not_found`."""
    each = find_loop(loops, name)
    with context.database.read() as session:
        return controller_view(session, context, each)


def controller_views(
    session: Session, context: ServiceContext, loops: Sequence[ControllerLoop]
) -> list[ControllerView]:
    rows = {row.name: row for row in session.scalars(select(Controller))}
    return [_view(session, context, each, rows.get(each.name)) for each in loops]


def controller_view(session: Session, context: ServiceContext, each: ControllerLoop) -> ControllerView:
    row = session.scalar(select(Controller).where(Controller.name == each.name))
    return _view(session, context, each, row)


def _view(session: Session, context: ServiceContext, each: ControllerLoop, row: Controller | None) -> ControllerView:
    now = database_now(session)
    backlog = each.backlog(session, context) if each.backlog is not None else None
    return ControllerView(
        name=each.name,
        interval_seconds=each.interval_seconds,
        paused_at=row.paused_at if row else None,
        paused_by=row.paused_by if row else None,
        pause_reason=row.pause_reason if row else None,
        run_requested_at=row.run_requested_at if row else None,
        run_answered_at=row.run_answered_at if row else None,
        due=backlog.due if backlog else None,
        leased=backlog.leased if backlog else None,
        lag_seconds=_lag_seconds(backlog.oldest_due_at, now) if backlog else None,
        done=row.done if row else 0,
        failed=row.failed if row else 0,
        error=row.error if row else None,
        error_at=row.error_at if row else None,
        last_pass_at=row.ended_at if row else None,
        report=row.report if row else None,
        report_at=row.report_at if row else None,
        pass_seconds=row.pass_seconds if row else None,
    )


def _lag_seconds(oldest_due_at: datetime | None, now: datetime) -> float:
    """A row may be due for another reason than its date, and then its date is still to come."""
    return 0.0 if oldest_due_at is None else max(0.0, (now - oldest_due_at).total_seconds())


def pause_controller(
    context: ServiceContext, loops: Sequence[ControllerLoop], caller: Principal, name: str, request: PauseController
) -> ControllerView:
    """A paused one gets the new reason. Raises `forbidden`, `controller_not_found` and
    `invalid_request`."""
    each = find_loop(loops, name)
    if each.own:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"{name} looks after each process itself and cannot be paused. Pause a controller that works on rows.",
        )
    with context.database.transaction() as session:
        row = locked_row(session, name)
        if (row.paused_by, row.pause_reason) != (caller.name, request.reason) or row.paused_at is None:
            before = {"controller": name, "pause_reason": row.pause_reason} if row.paused_at else {"controller": name}
            row.paused_at = row.paused_at or database_now(session)
            row.paused_by = caller.name
            row.pause_reason = request.reason
            record_event(
                session,
                Actor.person(caller),
                "controller.pause",
                reason=request.reason,
                before=before,
                after={"controller": name, "pause_reason": request.reason},
            )
        return controller_view(session, context, each)


def resume_controller(
    context: ServiceContext, loops: Sequence[ControllerLoop], caller: Principal, name: str
) -> ControllerView:
    """Raises `forbidden` and `controller_not_found`."""
    each = find_loop(loops, name)
    with context.database.transaction() as session:
        row = locked_row(session, name)
        if row.paused_at is not None:
            record_event(
                session,
                Actor.person(caller),
                "controller.resume",
                before={"controller": name, "paused_by": row.paused_by, "pause_reason": row.pause_reason},
                after={"controller": name},
            )
            row.paused_at = row.paused_by = row.pause_reason = None
        return controller_view(session, context, each)


def run_controller(
    context: ServiceContext, loops: Sequence[ControllerLoop], caller: Principal, name: str
) -> ControllerView:
    """Asks for a pass now. `run_requested_at` of the answer is the request; `run_answered_at` reaches it when its
    pass is over. Raises `forbidden`, `controller_not_found` and `controller_paused`."""
    each = find_loop(loops, name)
    with context.database.transaction() as session:
        row = locked_row(session, name)
        if row.paused_at is not None:
            raise ProblemError(
                ProblemCode.CONTROLLER_PAUSED,
                f"{name} was paused by {row.paused_by}: {row.pause_reason}. Resume it first, with "
                f"`holdfast controllers resume {name}`.",
                controller=name,
            )
        row.run_requested_at = database_now(session)
        record_event(session, Actor.person(caller), "controller.run", after={"controller": name})
        session.flush()
        return controller_view(session, context, each)


_SHOWN_FOR = timedelta(days=1)


def list_workers(context: ServiceContext) -> list[WorkerView]:
    """The processes that serve or work now, and those that fell silent without a good-bye within the last day."""
    with context.database.read() as session:
        now = database_now(session)
        rows = session.scalars(
            select(Worker)
            .where(Worker.ended_at.is_(None), Worker.seen_at > now - _SHOWN_FOR)
            .order_by(Worker.started_at, Worker.id)
        ).all()
    return [
        WorkerView(
            id=row.id,
            kind="serve" if row.kind == "serve" else "worker",
            host=row.host,
            pid=row.pid,
            version=row.version,
            started_at=row.started_at,
            seen_at=row.seen_at,
            silent=now - row.seen_at > SILENT_AFTER,
            stores=row.stores,
            done=row.done,
        )
        for row in rows
    ]
