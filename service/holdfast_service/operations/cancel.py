"""Cancels an operation: at once while nobody is at it, else as soon as its handler says how far it is."""

from __future__ import annotations

from holdfast_protocol.operations import OperationView
from holdfast_protocol.states import OperationState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.operations import operation_views
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.operations.list_operations import find_operation


def cancel_operation(context: ServiceContext, caller: Principal, operation_id: str) -> OperationView:
    """What it has done stays done. Twice is fine, and one that has ended stays as it ended. Raises
    `operation_not_found`."""
    with context.database.transaction() as session:
        found = find_operation(session, caller, operation_id, lock=True)
        if found.ended_at is None and found.cancel_requested_at is None:
            before = found.state
            now = database_now(session)
            found.cancel_requested_at = now
            if before == OperationState.QUEUED:
                found.state = OperationState.CANCELLED
                found.ended_at = now
                found.leased_until = None
                found.error = "It was cancelled before a worker began it."
            record_event(
                session,
                Actor.person(caller),
                "operation.cancel",
                project_id=found.project_id,
                run_id=found.run_id,
                checkpoint_id=found.checkpoint_id,
                before={"operation": found.id, "state": before},
                after={"operation": found.id, "kind": found.kind, "state": found.state},
            )
        return operation_views(session, [found])[0]
