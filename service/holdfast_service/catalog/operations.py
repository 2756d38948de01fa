"""Long work that a person starts, as rows: started here by a verb's call, carried out by the controller `operations`.

    with context.database.transaction() as session:
        return start_operation(session, caller, "drill", project_id=project.id, run_id=run.id, arguments={})

Its handler stands in `operation_kinds`. The row is written in the caller's transaction, so a call that is refused
leaves none.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.canonical_json import canonical_bytes
from holdfast_protocol.operations import OperationProgress, OperationView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import OperationState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Operation
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.tables import Project, Run
from holdfast_service.clock import database_now
from holdfast_service.errors import ProblemError

_TRIES = 5


def start_operation(
    session: Session,
    caller: Principal,
    kind: str,
    *,
    project_id: str | None,
    run_id: str | None = None,
    checkpoint_id: str | None = None,
    arguments: dict[str, Any],
) -> OperationView:
    """Queues it, and says so in the audit. The same that is under way already is answered with and not started again:
    a call whose reply was lost may be repeated. `arguments` are JSON values and never a secret. Raises `busy`."""
    fingerprint = hashlib.sha256(canonical_bytes([kind, project_id, run_id, checkpoint_id, arguments])).hexdigest()
    row = {
        "id": f"op_{secrets.token_hex(6)}",
        "kind": kind,
        "project_id": project_id,
        "run_id": run_id,
        "checkpoint_id": checkpoint_id,
        "arguments": arguments,
        "fingerprint": fingerprint,
        "state": OperationState.QUEUED,
        "progress": {},
        "created_at": database_now(session),
        "created_by": caller.name,
        "created_by_token": caller.token_id,
        "tries": 0,
    }
    # Its twin may end between the two statements: then there is room for this one.
    for _ in range(_TRIES):
        insert_absent(session, Operation, [row])
        found = session.scalar(
            select(Operation).where(
                Operation.fingerprint == fingerprint,
                Operation.ended_at.is_(None),
                Operation.cancel_requested_at.is_(None),
            )
        )
        if found is not None:
            break
    else:
        raise ProblemError(ProblemCode.BUSY, "The same operation is started and ended again and again. Try again.")
    if found.id == row["id"]:
        record_event(
            session,
            Actor.person(caller),
            "operation.start",
            project_id=project_id,
            run_id=run_id,
            checkpoint_id=checkpoint_id,
            after={"operation": found.id, "kind": kind, "arguments": arguments},
        )
    return operation_views(session, [found])[0]


def operation_views(session: Session, rows: Sequence[Operation]) -> list[OperationView]:
    """In the order given."""
    projects = _names(session, Project, {row.project_id for row in rows})
    runs = _names(session, Run, {row.run_id for row in rows})
    return [
        OperationView(
            id=row.id,
            kind=row.kind,
            project=projects.get(row.project_id),
            run=runs.get(row.run_id),
            checkpoint_id=row.checkpoint_id,
            arguments=row.arguments,
            state=OperationState(row.state),
            progress=OperationProgress(**row.progress),
            result=row.result,
            error=row.error,
            created_at=row.created_at,
            created_by=row.created_by,
            started_at=row.started_at,
            ended_at=row.ended_at,
            cancel_requested_at=row.cancel_requested_at,
            tries=row.tries,
        )
        for row in rows
    ]


def _names(session: Session, table: type[Project] | type[Run], ids: set[str | None]) -> dict[str | None, str]:
    found = session.execute(select(table.id, table.name).where(table.id.in_(ids - {None})))
    return {row.id: row.name for row in found}
