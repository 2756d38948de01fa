"""Leaves calls of webhooks to be made, in the transaction of what happened: either both are there or neither is."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.events import Event, EventData, EventType
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.webhooks import Webhook, WebhookDelivery


def _hooks_wanting(session: Session, event: EventType, project_id: str) -> list[Webhook]:
    """The webhooks of the project that want such events. Read once in a session, and without a flush: a pass leaves
    thousands of events in one transaction."""
    known: dict[str, list[Webhook]] = session.info.setdefault("webhooks", {})
    if project_id not in known:
        of_project = select(Webhook).where(Webhook.project_id == project_id, Webhook.deleted_at.is_(None))
        with session.no_autoflush:
            known[project_id] = list(session.scalars(of_project.order_by(Webhook.id)))
    return [hook for hook in known[project_id] if event in hook.events]


def leave_calls(
    session: Session,
    event: EventType,
    subject: str,
    at: datetime,
    *,
    project_id: str,
    run_id: str | None,
    attempt: int | None,
    step: int | None,
    checkpoint_id: str | None,
    operation: str | None,
    reason: str | None,
) -> None:
    """For each webhook of the project that wants such events. Once for a `subject`, however often it is left."""
    wanting = _hooks_wanting(session, event, project_id)
    if not wanting:
        return
    body = Event(
        type=event,
        timestamp=at,
        data=EventData(
            project=session.execute(select(Project.name).where(Project.id == project_id)).scalar_one(),
            run=None if run_id is None else session.scalar(select(Run.name).where(Run.id == run_id)),
            attempt=attempt,
            step=step,
            checkpoint_id=checkpoint_id,
            operation=operation,
            reason=reason,
        ),
    )
    insert_absent(session, WebhookDelivery, [delivery_row(hook.id, subject, body) for hook in wanting])


def delivery_row(webhook_id: str, subject: str, body: Event) -> dict[str, object]:
    """Due at once."""
    return {
        "webhook_id": webhook_id,
        "event": body.type.value,
        "subject": subject,
        "body": body.model_dump(mode="json"),
        "created_at": body.timestamp,
        "tries": 0,
        "next_try_at": body.timestamp,
    }
