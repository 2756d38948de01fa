"""Leaves calls of webhooks to be made, in the transaction of what happened: either both are there or neither is."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.events import Event, EventData, EventType
from holdfast_protocol.states import StoreRole
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.webhooks import Webhook, WebhookDelivery
from holdfast_service.webhooks.formats import with_ends


def _hooks_wanting(session: Session, event: EventType, project_id: str | None) -> list[Webhook]:
    """The webhooks of the project, or of all of them, that want such events. Read once in a session, and without a
    flush: a pass leaves thousands of events in one transaction."""
    known: dict[str | None, list[Webhook]] = session.info.setdefault("webhooks", {})
    if project_id not in known:
        living = select(Webhook).where(Webhook.deleted_at.is_(None))
        of_project = living.where(Webhook.project_id == project_id)
        if project_id is None:
            of_project = living.join(Project, Project.id == Webhook.project_id).where(Project.deleted_at.is_(None))
        with session.no_autoflush:
            known[project_id] = list(session.scalars(of_project.order_by(Webhook.id)))
    return [hook for hook in known[project_id] if event in with_ends(hook.format, hook.events)]


def leave_calls(
    session: Session,
    event: EventType,
    subject: str,
    at: datetime,
    *,
    project_id: str | None,
    run_id: str | None,
    attempt: int | None,
    step: int | None,
    checkpoint_id: str | None,
    operation: str | None,
    store: StoreRole | None,
    reason: str | None,
) -> None:
    """For each webhook of the project, or of all of them, that wants such events. Once for a `subject`, however often
    it is left. A webhook hears the name of its own project."""
    wanting = _hooks_wanting(session, event, project_id)
    if not wanting:
        return
    data = EventData(
        run=None if run_id is None else session.scalar(select(Run.name).where(Run.id == run_id)),
        attempt=attempt,
        step=step,
        checkpoint_id=checkpoint_id,
        operation=operation,
        store=store,
        reason=reason,
    )
    of_hooks = Project.id.in_({hook.project_id for hook in wanting})
    names: dict[str, str] = dict(session.execute(select(Project.id, Project.name).where(of_hooks)).all())
    told = {each: data.model_copy(update={"project": name}) for each, name in names.items()}
    rows = [
        delivery_row(hook.id, subject, Event(type=event, timestamp=at, data=told[hook.project_id])) for hook in wanting
    ]
    insert_absent(session, WebhookDelivery, rows)


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
