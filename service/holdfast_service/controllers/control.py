"""What a person may tell a controller: pause, resume, run now. Each is an audit event, and twice is fine.

A pause lets rounds under way end, and begins none. A run is done once, by whichever process is first.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_protocol.controllers import ControllerView, PauseController
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.rounds import Round
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.controllers.find import find_round, locked_row
from holdfast_service.controllers.look import controller_view
from holdfast_service.errors import ProblemError


def pause_controller(
    context: ServiceContext, rounds: Sequence[Round], caller: Principal, name: str, request: PauseController
) -> ControllerView:
    """One that is paused already gets the new reason. Raises `forbidden`, `controller_not_found` and
    `invalid_request`."""
    caller.check_every_project()
    each = find_round(rounds, name)
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


def resume_controller(context: ServiceContext, rounds: Sequence[Round], caller: Principal, name: str) -> ControllerView:
    """Raises `forbidden` and `controller_not_found`."""
    caller.check_every_project()
    each = find_round(rounds, name)
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


def run_controller(context: ServiceContext, rounds: Sequence[Round], caller: Principal, name: str) -> ControllerView:
    """Asks for a round now. `run_requested_at` of the answer is the request; `run_answered_at` reaches it when its
    round is over. Raises `forbidden`, `controller_not_found` and `controller_paused`."""
    caller.check_every_project()
    each = find_round(rounds, name)
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
