"""Audit events: every change that a person or a controller makes, written in the change's own transaction.

Either both are there or neither is. The table is append-only, by a trigger of the database.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from holdfast_protocol.states import Health, OperationState
from holdfast_protocol.webhooks import WebhookEvent
from holdfast_service.auth.principal import Principal
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import note_change
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.webhooks.outbox import hooks_wanting, leave_calls

_CALLS = {
    "attempt.lost": WebhookEvent.ATTEMPT_LOST,
    "attempt.stalled": WebhookEvent.RUN_STALLED,
    "attempt.goes_on": WebhookEvent.RUN_GOES_ON,
    "checkpoint.trash": WebhookEvent.CHECKPOINT_TRASHED,
    "checkpoint.expire": WebhookEvent.CHECKPOINT_TRASHED,
    "checkpoint.delete": WebhookEvent.CHECKPOINT_PURGED,
}
_DRILL_CALLS: dict[str, WebhookEvent] = {
    OperationState.DONE: WebhookEvent.DRILL_SUCCEEDED,
    OperationState.FAILED: WebhookEvent.DRILL_FAILED,
}
_HEALTH_CALLS: dict[str, WebhookEvent] = {
    Health.CORRUPT: WebhookEvent.CHECKPOINT_CORRUPT,
    Health.QUARANTINED: WebhookEvent.CHECKPOINT_QUARANTINED,
    Health.DIVERGED: WebhookEvent.CHECKPOINT_DIVERGED,
}


@dataclass(frozen=True)
class Actor:
    """Who changes something: a person by the name of their token, or a controller by its own."""

    kind: Literal["person", "controller"]
    name: str
    token_id: str | None = None

    @classmethod
    def person(cls, caller: Principal) -> Actor:
        return cls("person", caller.name, caller.token_id)

    @classmethod
    def at_the_database(cls) -> Actor:
        """Who runs `holdfast admin …`: a person that has the database's address, and no token."""
        return cls("person", "holdfast admin")

    @classmethod
    def controller(cls, name: str) -> Actor:
        return cls("controller", name)


def record_event(
    session: Session,
    actor: Actor,
    action: str,
    *,
    project_id: str | None = None,
    run_id: str | None = None,
    checkpoint_id: str | None = None,
    reason: str | None = None,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    """`action` is noun.verb, such as `checkpoint.trash`; `before` and `after` hold only what changed, as JSON values,
    and never a secret."""
    event = AuditEvent(
        at=database_now(session),
        actor_kind=actor.kind,
        actor=actor.name,
        token_id=actor.token_id,
        action=action,
        project_id=project_id,
        run_id=run_id,
        checkpoint_id=checkpoint_id,
        reason=reason,
        before=before,
        after=after,
    )
    session.add(event)
    note_change(session, f"{action} by {actor.name}" + (f" of {checkpoint_id}" if checkpoint_id else ""))
    call = _webhook_event(action, before or {}, after or {})
    if call is not None and project_id is not None and (wanting := hooks_wanting(session, call, project_id)):
        session.flush()
        leave_calls(
            session,
            call,
            f"event {event.id}",
            wanting=wanting,
            project_id=project_id,
            run_id=run_id,
            attempt=(after or {}).get("attempt"),
            step=(after or {}).get("step"),
            checkpoint_id=checkpoint_id,
            operation=(after or {}).get("operation"),
            reason=reason,
        )


def _webhook_event(action: str, before: dict[str, Any], after: dict[str, Any]) -> WebhookEvent | None:
    """Whom it concerns besides those who read the events. A checkpoint's health tells by what it has become."""
    if action in _CALLS:
        return _CALLS[action]
    if action == "operation.end" and after.get("kind") == "drill":
        return _DRILL_CALLS.get(after["state"])
    health = after.get("health")
    return _HEALTH_CALLS.get(health) if isinstance(health, str) and health != before.get("health") else None
