"""Releases a hold: never by the token that placed it, so that one person alone cannot take anything away.

The checkpoint is free at once. Where the store's Object Lock mirrors the hold, `mirror.py` takes the lock off next, and
nothing is deleted before that.
"""

from __future__ import annotations

from holdfast_protocol.holds import HoldView, ReleaseHold
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.holds.view import hold_view, locked_hold


def release_hold(context: ServiceContext, caller: Principal, hold_id: str, request: ReleaseHold) -> HoldView:
    """Twice is fine, and the first release stays. Raises `hold_not_found` and `forbidden`."""
    with context.database.transaction() as session:
        hold, checkpoint, run, project = locked_hold(session, caller, hold_id)
        if hold.placed_by_token == caller.token_id:
            raise ProblemError(
                ProblemCode.FORBIDDEN,
                f"The token {caller.name!r} has placed this hold, and only another person's can release it. Ask "
                "another administrator.",
                hold_id=hold.id,
            )
        now = database_now(session)
        if hold.released_at is None:
            hold.released_at, hold.released_by, hold.release_reason = now, caller.name, request.reason
            checkpoint.version += 1
            record_event(
                session,
                Actor.person(caller),
                "hold.release",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint.id,
                reason=request.reason,
                before={"hold": hold.id, "kind": hold.kind, "reason": hold.reason, "placed_by": hold.placed_by},
            )
            session.flush()
        return hold_view(hold, checkpoint, run, project, now)
