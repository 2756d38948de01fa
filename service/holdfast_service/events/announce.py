"""Tells of an event in the transaction in which it happens: either both are there or neither is."""

from __future__ import annotations

import uuid
from datetime import datetime

from sqlalchemy.orm import Session

from holdfast_protocol.events import EventType
from holdfast_protocol.states import StoreRole
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.events import EventRow
from holdfast_service.webhooks.outbox import leave_calls

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
    reason: str | None = None,
) -> None:
    """Once for a `subject` of the project, however often it is announced; each time if there is none. `project_id`
    None: it concerns all projects. `at`: by the catalog's clock."""
    shown = None if reason is None else reason[:_LONGEST_REASON]
    row = {
        "type": event.value,
        "subject": subject,
        "happened_at": at,
        "project_id": project_id,
        "run_id": run_id,
        "attempt": attempt,
        "step": step,
        "checkpoint_id": checkpoint_id,
        "operation": operation,
        "store": None if store is None else store.value,
        "reason": shown,
    }
    if subject is None:
        session.add(EventRow(**row))  # written with others: a pass of retention announces thousands
    else:
        insert_absent(session, EventRow, [row])
    leave_calls(
        session,
        event,
        subject or uuid.uuid4().hex,
        at,
        project_id=project_id,
        run_id=run_id,
        attempt=attempt,
        step=step,
        checkpoint_id=checkpoint_id,
        operation=operation,
        store=store,
        reason=shown,
    )
