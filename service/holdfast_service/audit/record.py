"""Audit events: every change that a person or a controller makes, written in the change's own transaction.

Either both are there or neither is. The table is append-only, by a trigger of the database.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from holdfast_protocol.events import EventType
from holdfast_protocol.states import Health, OperationState
from holdfast_service.auth.principal import Principal
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import note_change
from holdfast_service.db.tables.operations import AuditEvent
from holdfast_service.events.announce import announce

_EVENTS = {
    "attempt.lost": EventType.ATTEMPT_LOST,
    "attempt.stalled": EventType.RUN_STALLED,
    "attempt.goes_on": EventType.RUN_GOES_ON,
    "checkpoint.trash": EventType.CHECKPOINT_TRASHED,
    "checkpoint.expire": EventType.CHECKPOINT_TRASHED,
    "checkpoint.delete": EventType.CHECKPOINT_PURGED,
}
_DRILL_EVENTS: dict[str, EventType] = {
    OperationState.DONE: EventType.DRILL_SUCCEEDED,
    OperationState.FAILED: EventType.DRILL_FAILED,
}
_HEALTH_EVENTS: dict[str, EventType] = {
    Health.CORRUPT: EventType.CHECKPOINT_CORRUPT,
    Health.QUARANTINED: EventType.CHECKPOINT_QUARANTINED,
    Health.DIVERGED: EventType.CHECKPOINT_DIVERGED,
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
    at = database_now(session)
    session.add(
        AuditEvent(
            at=at,
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
    )
    note_change(session, f"{action} by {actor.name}" + (f" of {checkpoint_id}" if checkpoint_id else ""))
    event = _announced(action, before or {}, after or {})
    if event is not None and project_id is not None:
        announce(
            session,
            event,
            None,
            at,
            project_id=project_id,
            run_id=run_id,
            attempt=(after or {}).get("attempt"),
            step=(after or {}).get("step"),
            checkpoint_id=checkpoint_id,
            operation=(after or {}).get("operation"),
            reason=reason,
        )


def _announced(action: str, before: dict[str, Any], after: dict[str, Any]) -> EventType | None:
    """The event that it is, if it is one. A checkpoint's health tells by what it has become."""
    if action in _EVENTS:
        return _EVENTS[action]
    if action == "operation.end" and after.get("kind") == "drill":
        return _DRILL_EVENTS.get(after["state"])
    health = after.get("health")
    return _HEALTH_EVENTS.get(health) if isinstance(health, str) and health != before.get("health") else None
