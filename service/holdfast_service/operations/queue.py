"""Long work that a person starts, as rows: a verb's call starts it here, and the controller `operations` carries it
out.

    with context.database.transaction() as session:
        return start_operation(session, caller, "drill", project_id=project.id, run_id=run.id, arguments={})

Its handler stands in `background/registry.py`. The row is written in the caller's transaction: a refused call leaves
none.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.digests import canonical_bytes
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.service import OperationProgress, OperationView
from holdfast_protocol.states import OperationState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.repeats import Repeatable
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.operations import Operation
from holdfast_service.errors import ProblemError

# A handler may report its progress more often than people read it.
WRITTEN_EVERY_SECONDS = 1.0


class HandlerStopped(Exception):  # noqa: N818 (as HandlerError is what its children are not: errors)
    """The handler must end now. It is no failure."""


class OperationCancelled(HandlerStopped):
    """A person has cancelled it."""


class LeaseLost(HandlerStopped):
    """It took longer than its lease without a word, and another worker has it now."""


class ProcessEnds(HandlerStopped):
    """This process was asked to end. Another one goes on."""


@dataclass
class OperationRun:
    """One try of an operation, as its handler sees it. `arguments` are those it was started with; `actor` is the person
    who started it, for the events that the handler writes. `said` is how far it is. `kept`: what an earlier try
    has kept, to go on from there.

    A handler calls `progress` between two steps. That renews the lease, which keeps other workers from it, and raises
    if the handler must stop: a person cancelled it, another worker has it, or this process is asked to end. A handler
    lets these through; what it has done stays done, because every step may run twice.
    """

    context: ServiceContext = field(repr=False)
    id: str
    kind: str
    project_id: str | None
    run_id: str | None
    checkpoint_id: str | None
    arguments: dict[str, Any]
    actor: Actor
    lease_token: str
    tries: int
    kept: dict[str, Any] | None = None
    said: dict[str, Any] = field(default_factory=dict)
    _written_at: float = float("-inf")

    def progress(
        self,
        *,
        done: int | None = None,
        total: int | None = None,
        note: str | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        """What is left out stays as it was said before. `kept`: JSON values, which the next try gets if this one does
        not end. Raises HandlerStopped. Call it outside of transactions."""
        self.kept = kept or self.kept
        said = {"done": done, "total": total, "note": note}
        self.said |= {name: value for name, value in said.items() if value is not None}
        if self.context.stopping.is_set():
            raise ProcessEnds
        if time.monotonic() - self._written_at < WRITTEN_EVERY_SECONDS:
            return
        with self.context.database.transaction() as session:
            mine, seconds = Operation.id == self.id, self.context.settings.lease_seconds
            renewed = lease.renew(
                session, Operation, self.lease_token, mine, seconds=seconds, progress=self.said, kept=self.kept
            )
            cancelled = session.scalar(select(Operation.cancel_requested_at).where(mine))
        self._written_at = time.monotonic()
        if not renewed:
            raise LeaseLost
        if cancelled is not None:
            raise OperationCancelled


Handler = Callable[[ServiceContext, OperationRun], dict[str, Any]]
"""Carries out one kind of operation, and returns what came of it as JSON values. See `background/registry.py`."""


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
    key: str | None = None,
) -> OperationView:
    """Queues it, and says so in the audit. The same that is under way already is answered with and not started again:
    a call whose reply was lost may be repeated. With the client's Idempotency-Key in `key` that holds after the
    operation's end too. `arguments` are JSON values and never a secret. Raises `busy` and `idempotency_key_reused`."""
    fingerprint = hashlib.sha256(canonical_bytes([kind, project_id, run_id, checkpoint_id, arguments])).hexdigest()
    repeat = Repeatable(caller.token_id, key, fingerprint)
    if (earlier := repeat.earlier(session)) is not None:
        known = session.get(Operation, earlier)
        if known is not None:  # else the service has forgotten it, and this is a new one
            return operation_views(session, [known])[0]
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
    repeat.made(session, found.id)
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
