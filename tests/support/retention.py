"""What tests of retention ask and do, call by call."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select, update

import holdfast_service.retention.purge
from holdfast_protocol.states import CopyState
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Copy
from holdfast_service.db.tables.operations import AuditEvent, Controller
from holdfast_service.retention.purge import PurgeReport
from tests.support.rank import answer
from tests.support.service import RunningService

RUN = "/v1/projects/demo/runs/gpt"
HOUR = 3600.0


def put_policy(service: RunningService, etag: str | None = None, **rules: Any) -> dict[str, Any]:
    headers = {} if etag is None else {"If-Match": etag}
    reply = service.http().put(f"{RUN}/policies/retention", json={"document": rules}, headers=headers)
    return answer(reply)  # type: ignore[no-any-return]


def plan(service: RunningService, **body: Any) -> dict[str, Any]:
    return answer(service.http().post(f"{RUN}/retention/plan", json=body))  # type: ignore[no-any-return]


def expiring(shown: dict[str, Any]) -> list[str]:
    return [one["checkpoint_id"] for one in shown["checkpoints"] if not one["keep"]]


def apply(service: RunningService, shown: dict[str, Any]) -> dict[str, Any]:
    body = {"policy_digest": shown["policy_digest"], "checkpoint_ids": expiring(shown)}
    return answer(service.http().post(f"{RUN}/retention/apply", json=body))  # type: ignore[no-any-return]


def prune(service: RunningService, **body: Any) -> dict[str, Any]:
    return answer(service.http().post(f"{RUN}/retention/prune", json=body))  # type: ignore[no-any-return]


def undelete(service: RunningService, checkpoint_id: str, **body: Any) -> dict[str, Any]:
    reply = service.http().post(f"/v1/checkpoints/{checkpoint_id}/undelete", json=body)
    return answer(reply)  # type: ignore[no-any-return]


def pin(service: RunningService, checkpoint_id: str, **body: Any) -> dict[str, Any]:
    reply = service.http().put(f"/v1/checkpoints/{checkpoint_id}/pin", json={"reason": "paper"} | body)
    return answer(reply)  # type: ignore[no-any-return]


def purge(service: RunningService) -> PurgeReport:
    """A pass, as if the one before had been a moment ago: the test has moved the clock, and no service was down."""
    with service.context.database.transaction() as session:
        now = database_now(session)
        session.execute(update(Controller).where(Controller.name == "purge").values(reconciled_at=now))
    return holdfast_service.retention.purge.reconcile(service.context)


def state(service: RunningService, checkpoint_id: str) -> str:
    with service.context.database.read() as session:
        return session.execute(select(Checkpoint.state).where(Checkpoint.id == checkpoint_id)).scalar_one()


def states(service: RunningService) -> dict[int, str]:
    """By step."""
    with service.context.database.read() as session:
        return {row.step: row.state for row in session.execute(select(Checkpoint.step, Checkpoint.state))}


def events(service: RunningService, checkpoint_id: str) -> list[tuple[str, str, str | None]]:
    """(who, what, why), the oldest first."""
    with service.context.database.read() as session:
        rows = session.scalars(
            select(AuditEvent).where(AuditEvent.checkpoint_id == checkpoint_id).order_by(AuditEvent.id)
        )
        return [(row.actor, row.action, row.reason) for row in rows]


def stored_bytes(service: RunningService) -> int:
    with service.context.database.read() as session:
        return int(session.scalar(select(func.sum(Copy.stored_bytes)).where(Copy.state != CopyState.GONE)) or 0)
