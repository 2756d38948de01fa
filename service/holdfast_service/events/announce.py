"""Tells of an event in the transaction in which it happens, and leaves the calls of webhooks that it makes: either all
are there or none is. `announce` is for any event; the functions after it tell of an attempt: its restore and why there
is no later one, its end, the end of its stall, and that it was not lost after all."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.events import Event, EventData, EventType
from holdfast_protocol.restores import RestoreDecision, skipped_in_words
from holdfast_protocol.states import AttemptOutcome, StoreRole
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Attempt, Project, Run
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


_ENDS = {
    AttemptOutcome.FAILED: EventType.ATTEMPT_FAILED,
    AttemptOutcome.PREEMPTED: EventType.ATTEMPT_PREEMPTED,
    AttemptOutcome.FINISHED: EventType.ATTEMPT_FINISHED,
}


def announce_end(session: Session, run: Run, attempt: Attempt, now: datetime) -> None:
    """Its own word. What others find out, `liveness/lost_attempts.py` tells."""
    event = _ENDS.get(AttemptOutcome(str(attempt.outcome)))
    if event is not None:
        announce(
            session,
            event,
            f"attempt {attempt.number} of {run.id}",
            now,
            project_id=run.project_id,
            run_id=run.id,
            attempt=attempt.number,
            step=attempt.last_step,
            reason=attempt.outcome_detail,
        )


_KEPT = 20
_LONGEST_DETAIL = 200


def kept_skipped(decision: RestoreDecision) -> list[dict[str, Any]]:
    """What an attempt's row keeps of the checkpoints that were skipped for it: bounded, for each run has many."""
    kept = [each.model_copy(update={"detail": each.detail[:_LONGEST_DETAIL]}) for each in decision.skipped[:_KEPT]]
    return [each.model_dump(mode="json") for each in kept]


def why_there(decision: RestoreDecision) -> str | None:
    """`skipped 1500 (aborted: disk full), 1400 (corrupt: a hole)`; None if the restore point is the newest."""
    return f"skipped {skipped_in_words(decision.skipped)}" if decision.skipped else None


def announce_restore(
    session: Session,
    run: Run,
    attempt: Attempt,
    event: EventType,
    *,
    checkpoint_id: str,
    step: int | None,
    reason: str | None = None,
) -> None:
    announce(
        session,
        event,
        f"attempt {attempt.number} of {run.id} from {checkpoint_id}",
        database_now(session),
        project_id=run.project_id,
        run_id=run.id,
        attempt=attempt.number,
        step=step,
        checkpoint_id=checkpoint_id,
        reason=reason,
    )


def end_stalls(session: Session, attempt_ids: Collection[int]) -> None:
    """The attempts have ended, and so has the stall of those that stood still: no later pass would tell so. Behind the
    statement that has ended them."""
    if not attempt_ids:
        return
    stalled = session.execute(
        select(Attempt, Run.project_id)
        .join(Run, Run.id == Attempt.run_id)
        .where(Attempt.id.in_(attempt_ids), Attempt.stalled_at.is_not(None))
        .order_by(Attempt.id),
        execution_options={"populate_existing": True},
    ).all()
    for attempt, project_id in stalled:
        attempt.stalled_at = None
        reason = f"its attempt has ended: {attempt.outcome}"
        _announce_state(session, EventType.RUN_GOES_ON, attempt, project_id, reason)


def announce_revival(session: Session, attempt: Attempt, project_id: str, reason: str) -> None:
    """It was called lost, and was not."""
    _announce_state(session, EventType.ATTEMPT_REVIVED, attempt, project_id, reason)


def _announce_state(session: Session, event: EventType, attempt: Attempt, project_id: str, reason: str) -> None:
    """Each time: an attempt can stall, or be called lost, more than once."""
    announce(
        session,
        event,
        None,
        database_now(session),
        project_id=project_id,
        run_id=attempt.run_id,
        attempt=attempt.number,
        step=attempt.last_step,
        reason=reason,
    )
