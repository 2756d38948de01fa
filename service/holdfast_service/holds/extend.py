"""Moves the end of a retain-until further away. It never comes nearer."""

from __future__ import annotations

from holdfast_protocol.holds import ExtendHold, HoldKind, HoldView
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.holds.view import hold_view, is_in_force, locked_hold


def extend_hold(context: ServiceContext, caller: Principal, hold_id: str, request: ExtendHold) -> HoldView:
    """The same end again is fine. Raises `hold_not_found` and `invalid_request`."""
    with context.database.transaction() as session:
        hold, checkpoint, run, project = locked_hold(session, caller, hold_id)
        now = database_now(session)
        if not is_in_force(hold, now):
            raise ProblemError(ProblemCode.INVALID_REQUEST, "The hold is over and cannot be extended. Place a new one.")
        if hold.kind != HoldKind.RETAIN_UNTIL or hold.retain_until is None:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                "The hold has no end, and to give it one would shorten it. Let somebody else release it, or leave it.",
            )
        _refuse_shorter(hold, request)
        if request.retain_until > hold.retain_until:
            record_event(
                session,
                Actor.person(caller),
                "hold.extend",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint.id,
                reason=hold.reason,
                before={"hold": hold.id, "retain_until": hold.retain_until.isoformat()},
                after={"hold": hold.id, "retain_until": request.retain_until.isoformat()},
            )
            hold.retain_until = request.retain_until
            checkpoint.version += 1
            session.flush()
        return hold_view(hold, checkpoint, run, project, now)


def _refuse_shorter(hold: Hold, request: ExtendHold) -> None:
    if hold.retain_until is not None and request.retain_until < hold.retain_until:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The hold is in force until {hold.retain_until:%Y-%m-%d %H:%M} UTC and is never shortened. Name a later "
            "time, or let somebody else release it.",
            retain_until=hold.retain_until.isoformat(),
        )
