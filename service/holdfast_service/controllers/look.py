"""How each controller is doing, for people: its row, and how much work waits for it now."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.controllers import ControllerView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.custody_tables import Controller
from holdfast_service.catalog.rounds import Round
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.controllers.find import find_round


def list_controllers(context: ServiceContext, rounds: Sequence[Round], caller: Principal) -> list[ControllerView]:
    """Raises `forbidden` for a project's token."""
    caller.check_every_project()
    with context.database.read() as session:
        return controller_views(session, context, rounds)


def show_controller(context: ServiceContext, rounds: Sequence[Round], caller: Principal, name: str) -> ControllerView:
    """Raises `forbidden` and `controller_not_found`."""
    caller.check_every_project()
    each = find_round(rounds, name)
    with context.database.read() as session:
        return controller_view(session, context, each)


def controller_views(session: Session, context: ServiceContext, rounds: Sequence[Round]) -> list[ControllerView]:
    return [controller_view(session, context, each) for each in rounds]


def controller_view(session: Session, context: ServiceContext, each: Round) -> ControllerView:
    now = database_now(session)
    row = session.scalar(select(Controller).where(Controller.name == each.name))
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
        last_round_at=row.ended_at if row else None,
        report=row.report if row else None,
        report_at=row.report_at if row else None,
        round_seconds=row.round_seconds if row else None,
    )


def _lag_seconds(oldest_due_at: datetime | None, now: datetime) -> float:
    """A row may be due for another reason than its date, and then its date is still to come."""
    return 0.0 if oldest_due_at is None else max(0.0, (now - oldest_due_at).total_seconds())
