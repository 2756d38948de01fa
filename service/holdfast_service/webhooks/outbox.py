"""Leaves calls of webhooks to be made, in the transaction of what happened: either both are there or neither is."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.webhooks import WebhookBody, WebhookData, WebhookEvent
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.webhooks import Webhook, WebhookDelivery

_LONGEST_REASON = 500


def hooks_wanting(session: Session, event: WebhookEvent, project_id: str) -> list[Webhook]:
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
    event: WebhookEvent,
    subject: str,
    *,
    project_id: str,
    wanting: Sequence[Webhook] | None = None,
    run_id: str | None = None,
    attempt: int | None = None,
    step: int | None = None,
    checkpoint_id: str | None = None,
    operation: str | None = None,
    reason: str | None = None,
) -> None:
    """For each webhook of the project that wants such events. Once for a `subject`, however often it is left.
    `wanting`: these webhooks, where the caller has read them."""
    if wanting is None:
        wanting = hooks_wanting(session, event, project_id)
    if not wanting:
        return
    now = database_now(session)
    body = WebhookBody(
        type=event,
        timestamp=now,
        data=WebhookData(
            project=session.execute(select(Project.name).where(Project.id == project_id)).scalar_one(),
            run=None if run_id is None else session.scalar(select(Run.name).where(Run.id == run_id)),
            attempt=attempt,
            step=step,
            checkpoint_id=checkpoint_id,
            operation=operation,
            reason=None if reason is None else reason[:_LONGEST_REASON],
        ),
    )
    insert_absent(session, WebhookDelivery, [delivery_row(hook.id, subject, body) for hook in wanting])


def delivery_row(webhook_id: str, subject: str, body: WebhookBody) -> dict[str, object]:
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
