"""An attempt is alive, and how far it has come. The reply tells how often to save."""

from __future__ import annotations

from sqlalchemy import func, update

from holdfast_protocol.attempts import Heartbeat, HeartbeatReply
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.fencing import pass_fence
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Attempt
from holdfast_service.catalog.writing import beat
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext


def take_heartbeat(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: Heartbeat
) -> HeartbeatReply:
    """Raises `stale_attempt`: so a fenced job learns of it also while it saves nothing."""
    with context.database.transaction() as session:
        _, run = run_named(session, caller, project_name, run_name)
        _, attempt = pass_fence(session, run.id, request, context.epoch)
        beat(session, attempt, database_now(session), context.settings)
        if request.step is not None:
            session.execute(
                update(Attempt)
                .where(Attempt.id == attempt.id, func.coalesce(Attempt.last_step, -1) < request.step)
                .values(last_step=request.step),
                execution_options={"synchronize_session": False},
            )
    return HeartbeatReply(save_interval_seconds=context.settings.save_interval_seconds)
