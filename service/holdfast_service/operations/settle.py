"""How a try of an operation ended, written only while its lease is still the one that was given (`lease_token`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.states import OperationState
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Operation
from holdfast_service.catalog.operation_run import OperationRun
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext

_ACTOR = Actor.controller("operations")
CANCELLED = "It was cancelled. What it had done by then stays done."
AGAIN_AFTER_SECONDS = 15


def settle(
    context: ServiceContext,
    run: OperationRun,
    state: OperationState,
    *,
    result: dict[str, Any] | None = None,
    error: str | None = None,
) -> bool:
    """False if somebody else has it by now: then nothing is written."""
    with context.database.transaction() as session:
        found = _mine(session, run)
        if found is None:
            return False
        found.progress = {**found.progress, **run.said}  # its last word may not have been written
        end(session, found, state, result=result, error=error)
        return True


def give_back(
    context: ServiceContext, run: OperationRun, *, error: str | None = None, counted: bool, wait_seconds: float = 0.0
) -> bool:
    """Puts it back into the queue, for any worker. `counted`: this try was one of those that are allowed."""
    with context.database.transaction() as session:
        found = _mine(session, run)
        if found is None:
            return False
        found.state = OperationState.QUEUED
        found.lease_token = None
        found.leased_until = database_now(session) + timedelta(seconds=wait_seconds) if wait_seconds else None
        found.error = error
        if not counted:
            found.tries -= 1
        return True


def end(
    session: Session,
    found: Operation,
    state: OperationState,
    *,
    result: dict[str, Any] | None = None,
    error: str | None = None,
) -> None:
    """Of a row that is locked by the caller."""
    before = found.state
    found.state = state
    found.result = result
    found.error = error
    found.ended_at = database_now(session)
    found.leased_until = found.lease_token = None
    record_event(
        session,
        _ACTOR,
        "operation.end",
        project_id=found.project_id,
        run_id=found.run_id,
        checkpoint_id=found.checkpoint_id,
        reason=error,
        before={"operation": found.id, "state": before},
        after={"operation": found.id, "kind": found.kind, "state": state},
    )


def _mine(session: Session, run: OperationRun) -> Operation | None:
    return session.scalar(
        select(Operation).where(Operation.id == run.id, Operation.lease_token == run.lease_token).with_for_update()
    )
