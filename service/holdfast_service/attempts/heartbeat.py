"""An attempt is alive, and how far it has come. The reply tells how often to save."""

from __future__ import annotations

from holdfast_protocol.attempts import Heartbeat, HeartbeatReply
from holdfast_service.attempts.account import take_account
from holdfast_service.attempts.refused import hearing_the_refused
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.fencing import pass_fence
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.writing import beat, lock_attempt
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext


def take_heartbeat(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: Heartbeat
) -> HeartbeatReply:
    """Raises `stale_attempt`: so a fenced job learns of it also while it saves nothing."""
    with (
        hearing_the_refused(context, caller, project_name, run_name, request),
        context.database.transaction() as session,
    ):
        _, run = run_named(session, caller, project_name, run_name, deleted=True)
        _, attempt = pass_fence(session, run.id, request, context.epoch)
        now = database_now(session)
        beat(session, attempt, now, context.settings)
        lock_attempt(session, attempt)
        take_account(session, attempt, request, now)
    return HeartbeatReply(save_interval_seconds=context.save_advice.interval_seconds(run.id))
