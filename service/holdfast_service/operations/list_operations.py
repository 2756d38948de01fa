"""Operations for people: listed and cancelled."""

from __future__ import annotations

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import OperationState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.pages import cut_page, decode_cursor, moment_from_text, moment_to_text
from holdfast_service.db.tables.operations import Operation
from holdfast_service.errors import ProblemError
from holdfast_service.operations.queue import operation_views
from holdfast_service.runs.views import project_named, run_named

_CURSOR = "operations"


def list_operations(
    context: ServiceContext,
    caller: Principal,
    *,
    project: str | None,
    run: str | None,
    checkpoint_id: str | None,
    kind: str | None,
    state: OperationState | None,
    cursor: str | None,
    limit: int,
) -> Page[OperationView]:
    """The newest first. A project's token sees its project's only. Raises `forbidden`, `project_not_found`,
    `run_not_found` and `invalid_request`."""
    query = select(Operation).order_by(Operation.created_at.desc(), Operation.id.desc()).limit(limit + 1)
    if caller.project_id is not None:
        query = query.where(Operation.project_id == caller.project_id)
    if checkpoint_id is not None:
        query = query.where(Operation.checkpoint_id == checkpoint_id)
    if kind is not None:
        query = query.where(Operation.kind == kind)
    if state is not None:
        query = query.where(Operation.state == state)
    if cursor is not None:
        created_at, operation_id = decode_cursor(_CURSOR, cursor, str, str)
        query = query.where(tuple_(Operation.created_at, Operation.id) < (moment_from_text(created_at), operation_id))
    with context.database.read() as session:
        if run is not None:
            if project is None:
                raise ProblemError(ProblemCode.INVALID_REQUEST, "A run's name needs its project's. Give both.")
            query = query.where(Operation.run_id == run_named(session, caller, project, run, deleted=True)[1].id)
        elif project is not None:
            query = query.where(Operation.project_id == project_named(session, caller, project, deleted=True).id)
        rows, next_cursor = cut_page(
            _CURSOR, session.scalars(query).all(), limit, lambda row: (moment_to_text(row.created_at), row.id)
        )
        return Page(items=operation_views(session, rows), next_cursor=next_cursor)


def show_operation(context: ServiceContext, caller: Principal, operation_id: str) -> OperationView:
    """Raises `operation_not_found`."""
    with context.database.read() as session:
        return operation_views(session, [find_operation(session, caller, operation_id)])[0]


def find_operation(session: Session, caller: Principal, operation_id: str, *, lock: bool = False) -> Operation:
    """Raises `operation_not_found`, also if the caller may not know of it."""
    query = select(Operation).where(Operation.id == operation_id)
    found = session.scalar(query.with_for_update() if lock else query)
    if found is None or (caller.project_id is not None and found.project_id != caller.project_id):
        raise ProblemError(
            ProblemCode.OPERATION_NOT_FOUND,
            f"There is no operation {operation_id[:50]!r}. Correct the id; `holdfast operations list` shows them.",
        )
    return found


def cancel_operation(context: ServiceContext, caller: Principal, operation_id: str) -> OperationView:
    """Cancels an operation: at once if no worker has it, else as soon as its handler reports its progress. What it has
    done stays done. Twice is fine, and an ended one stays as it ended. Raises `operation_not_found`."""
    with context.database.transaction() as session:
        found = find_operation(session, caller, operation_id, lock=True)
        if found.ended_at is None and found.cancel_requested_at is None:
            before = found.state
            now = database_now(session)
            found.cancel_requested_at = now
            if before == OperationState.QUEUED:
                found.state = OperationState.CANCELLED
                found.ended_at = now
                lease.end_locked(found)
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
