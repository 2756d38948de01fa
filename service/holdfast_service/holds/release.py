"""Releases a hold: never by who placed it, nor by a token of the same line (same_line.py), so that one person alone
cannot take anything away.

The checkpoint is free at once. Where the store's Object Lock mirrors the hold, `mirror.py` takes the lock off next, and
nothing is deleted before that.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from holdfast_protocol.holds import HoldView, ReleaseHold
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.holds.same_line import why_same_line
from holdfast_service.holds.view import hold_view, locked_hold


def release_hold(context: ServiceContext, caller: Principal, hold_id: str, request: ReleaseHold) -> HoldView:
    """Twice is fine, and the first release stays. Raises `hold_not_found` and `forbidden`."""
    with context.database.transaction() as session:
        hold, checkpoint, run, project = locked_hold(session, caller, hold_id)
        _refuse_same_person(session, caller, hold)
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


def _refuse_same_person(session: Session, caller: Principal, hold: Hold) -> None:
    why = why_same_line(session, caller.token_id, hold.placed_by_token, hold.placed_at)
    if why is None:
        return
    raise ProblemError(
        ProblemCode.FORBIDDEN,
        f"The token {caller.name!r} {why}, and only another person's can release it. Ask an administrator whose token "
        f"was there before the hold and has nothing to do with {hold.placed_by!r}, or who runs the database: `holdfast "
        "admin token` makes one.",
        hold_id=hold.id,
    )
