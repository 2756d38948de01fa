"""Audit events: every change that a person or a controller makes, written in the change's own transaction.

Either both are there or neither is. The table is append-only, by a trigger of the database.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.custody_tables import AuditEvent
from holdfast_service.clock import database_now


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
    session.add(
        AuditEvent(
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
    )
