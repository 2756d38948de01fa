"""An attempt says how it ended. What it leaves uploading is aborted by the reaper."""

from __future__ import annotations

from sqlalchemy.orm import Session

from holdfast_protocol.attempts import AttemptView, EndAttempt
from holdfast_protocol.redaction import without_secrets
from holdfast_protocol.states import AttemptOutcome
from holdfast_protocol.webhooks import WebhookEvent
from holdfast_service.attempts.account import take_account
from holdfast_service.attempts.refused import hearing_the_refused
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.fencing import pass_fence
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Attempt, Run
from holdfast_service.catalog.views import attempt_view
from holdfast_service.catalog.webhook_outbox import leave_calls
from holdfast_service.catalog.writing import lock_attempt
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext

_EVENTS = {
    AttemptOutcome.FAILED: WebhookEvent.ATTEMPT_FAILED,
    AttemptOutcome.PREEMPTED: WebhookEvent.ATTEMPT_PREEMPTED,
    AttemptOutcome.FINISHED: WebhookEvent.ATTEMPT_FINISHED,
}


def end_attempt(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: EndAttempt
) -> AttemptView:
    """The first word counts, and a repeated one changes nothing; only what was thought lost is corrected.

    A rank that crashed tells so at once. What the others then meet, torn down by their launcher, comes later, and adds
    only how far they had come.
    """
    with (
        hearing_the_refused(context, caller, project_name, run_name, request),
        context.database.transaction() as session,
    ):
        _, run = run_named(session, caller, project_name, run_name, deleted=True)
        _, attempt = pass_fence(session, run.id, request, context.epoch)
        lock_attempt(session, attempt)
        now = database_now(session)
        take_account(session, attempt, request, now)
        if attempt.outcome is None or attempt.outcome == AttemptOutcome.LOST:
            attempt.ended_at = now
            attempt.outcome = request.outcome
            attempt.outcome_detail = without_secrets(request.detail) or None
            attempt.error_type = request.error_type
            attempt.error_rank = request.error_rank
            attempt.notice = None if request.notice is None else request.notice.model_dump()
            attempt.stalled_at = None
            session.flush()
            _leave_calls(session, run, attempt)
            subject_changed(session, RecordKind.RUN, run.id, run.project_id)
        return attempt_view(attempt)


def _leave_calls(session: Session, run: Run, attempt: Attempt) -> None:
    event = _EVENTS.get(AttemptOutcome(str(attempt.outcome)))
    if event is not None:
        leave_calls(
            session,
            event,
            f"attempt {attempt.number} of {run.id}",
            project_id=run.project_id,
            run_id=run.id,
            attempt=attempt.number,
            step=attempt.last_step,
            reason=attempt.outcome_detail,
        )
