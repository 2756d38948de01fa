"""Tells of an event in the transaction in which it happens, and leaves the calls of webhooks that it makes: either all
are there or none is."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.events import Event, EventData, EventType
from holdfast_protocol.states import StoreRole
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.core import Project, Run
from holdfast_service.db.tables.events import EventRow
from holdfast_service.db.tables.webhooks import Webhook, WebhookDelivery
from holdfast_service.webhooks.formats import with_ends

_LONGEST_REASON = 500


def announce(
    session: Session,
    event: EventType,
    subject: str | None,
    at: datetime,
    *,
    project_id: str | None,
    run_id: str | None = None,
    attempt: int | None = None,
    step: int | None = None,
    checkpoint_id: str | None = None,
    operation: str | None = None,
    store: StoreRole | None = None,
    quota: str | None = None,
    reason: str | None = None,
) -> None:
    """Once for a `subject` of the project, however often it is announced; each time if there is none. `project_id`
    None: it concerns all projects, and so their webhooks. `at`: by the catalog's clock."""
    data = EventData(
        attempt=attempt,
        step=step,
        checkpoint_id=checkpoint_id,
        operation=operation,
        store=store,
        quota=quota,
        reason=None if reason is None else reason[:_LONGEST_REASON],
    )
    row = {
        "type": event.value,
        "subject": subject,
        "happened_at": at,
        "project_id": project_id,
        "run_id": run_id,
        **data.model_dump(mode="json", exclude={"project", "run"}),
    }
    if subject is None:
        session.add(EventRow(**row))  # written with others: a pass of retention announces thousands
    else:
        insert_absent(session, EventRow, [row])
    if wanting := _hooks_wanting(session, event, project_id):
        run = None if run_id is None else session.scalar(select(Run.name).where(Run.id == run_id))
        told = Event(type=event, timestamp=at, data=data.model_copy(update={"run": run}))
        _leave_calls(session, wanting, subject or uuid.uuid4().hex, told)


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


def _leave_calls(session: Session, wanting: list[Webhook], subject: str, told: Event) -> None:
    """Once for a `subject`, however often they are left. A webhook hears the name of its own project."""
    of_hooks = Project.id.in_({hook.project_id for hook in wanting})
    names: dict[str, str] = dict(session.execute(select(Project.id, Project.name).where(of_hooks)).all())
    bodies = {
        each: told.model_copy(update={"data": told.data.model_copy(update={"project": name})})
        for each, name in names.items()
    }
    rows = [delivery_row(hook.id, subject, bodies[hook.project_id]) for hook in wanting]
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
