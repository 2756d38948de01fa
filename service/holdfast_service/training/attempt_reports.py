"""What an attempt tells of itself while it lives and when it ends, and what is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session, defer

from holdfast_protocol.attempts import AttemptView, EndAttempt, Heartbeat, HeartbeatReply, ProgressReport
from holdfast_protocol.base import Fence, Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import AttemptOutcome, Scope
from holdfast_protocol.text import without_secrets
from holdfast_protocol.webhooks import WebhookEvent
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Attempt, Run
from holdfast_service.errors import ProblemError
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.outbox import subject_changed
from holdfast_service.runs.find import attempt_numbered, run_named
from holdfast_service.runs.views import attempt_view
from holdfast_service.training.fencing import beat, is_of_launch, lock_attempt, pass_fence, reached
from holdfast_service.webhooks.outbox import leave_calls

# What an attempt tells of itself, in a heartbeat or with its end, goes into its row.

_LONGEST_AGE_SECONDS = 3650 * 86400.0


def take_progress_report(session: Session, attempt: Attempt, told: ProgressReport, now: datetime) -> None:
    """The row is locked, or nobody else writes these columns meanwhile. What is older than what is known changes
    nothing: a request that was held up may arrive after a later one, and a rank may be behind another."""
    attempt.heartbeat_at = now
    if told.step is not None:
        reached(session, attempt, told.step)
    # A client of before protocol 1.3 tells no more than that.
    if told.steps_run is None or (attempt.steps_run is not None and told.steps_run < attempt.steps_run):
        return
    attempt.steps_run = told.steps_run
    if attempt.first_step is None and told.first_step is not None:
        attempt.first_step = told.first_step
        attempt.first_step_at = _ago(now, told.first_step_age_seconds, attempt.opened_at)
    if told.progress_age_seconds is not None:
        progressed_at = _ago(now, told.progress_age_seconds, attempt.opened_at)
        attempt.progressed_at = max(attempt.progressed_at or progressed_at, progressed_at)
    if told.steps_per_second is not None:
        attempt.steps_per_second = told.steps_per_second
    if told.restore_seconds is not None:
        attempt.restore_seconds = max(attempt.restore_seconds or 0.0, told.restore_seconds)
    if told.saves_begun is not None:
        attempt.saves_begun = max(attempt.saves_begun or 0, told.saves_begun)
    if told.save_blocked_seconds is not None:
        attempt.save_blocked_seconds = max(attempt.save_blocked_seconds or 0.0, told.save_blocked_seconds)
    attempt.doing = told.doing


def _ago(now: datetime, age_seconds: float | None, earliest: datetime) -> datetime:
    """Never before the attempt was opened: a process may have trained before, and clocks jump."""
    return max(earliest, now - timedelta(seconds=min(age_seconds or 0.0, _LONGEST_AGE_SECONDS)))


# A fenced attempt that calls was still alive when it was fenced: what the fence refuses is noted all the same.


@contextmanager
def hearing_the_refused(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, fence: Fence
) -> Iterator[None]:
    """Around the transaction that may be refused, which has left nothing. Should this process die before the note, the
    attempt's next call leaves it."""
    try:
        yield
    except ProblemError as error:
        if error.code is ProblemCode.STALE_ATTEMPT and fence.epoch == context.epoch:
            _note(context, caller, project_name, run_name, fence)
        raise


def _note(context: ServiceContext, caller: Principal, project_name: str, run_name: str, fence: Fence) -> None:
    with context.database.transaction() as session:
        _, run = run_named(session, caller, project_name, run_name, deleted=True)
        attempt = session.scalar(
            select(Attempt)
            .where(
                Attempt.run_id == run.id,
                Attempt.number == fence.attempt,
                Attempt.refused_at.is_(None),
                Attempt.outcome.in_((AttemptOutcome.FENCED, AttemptOutcome.LOST)),
            )
            .with_for_update(),
            execution_options={"populate_existing": True},
        )
        if attempt is None or attempt.number == run.latest_attempt or not is_of_launch(attempt, fence):
            return
        attempt.refused_at = database_now(session)
        if attempt.rolled_back_at is None:
            attempt.outcome = AttemptOutcome.FENCED
            attempt.outcome_detail = f"attempt {attempt.number + 1} has taken over while it was still alive"


# An attempt is alive, and how far it has come. The reply tells how often to save.


def take_heartbeat(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: Heartbeat
) -> HeartbeatReply:
    """Raises `stale_attempt`: so a fenced job learns of it also while it saves nothing."""
    with (
        hearing_the_refused(context, caller, project_name, run_name, request),
        context.database.transaction() as session,
    ):
        _, run = run_named(session, caller, project_name, run_name, deleted=True)
        _, attempt = pass_fence(session, run.id, request, context.epoch)
        now = database_now(session)
        beat(session, attempt, now, context.settings)
        lock_attempt(session, attempt)
        take_progress_report(session, attempt, request, now)
    return HeartbeatReply(save_interval_seconds=context.save_advice.interval_seconds(run.id))


# An attempt says how it ended. What it leaves uploading is aborted by the reaper.

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
        take_progress_report(session, attempt, request, now)
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


# Reading attempts. For tokens that read and for those that train: a launch asks for the newest attempt's number.

_CURSOR = "attempts"


def list_attempts(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, *, cursor: str | None, limit: int
) -> Page[AttemptView]:
    """The newest first."""
    _check_scope(caller)
    with context.database.read() as session:
        _, run = run_named(session, caller, project_name, run_name)
        # A page of environments is much, and of use to nobody: who looks at one attempt sees it.
        statement = (
            select(Attempt)
            .options(defer(Attempt.environment))
            .where(Attempt.run_id == run.id)
            .order_by(Attempt.number.desc())
            .limit(limit + 1)
        )
        if cursor is not None:
            statement = statement.where(Attempt.number < decode_cursor(_CURSOR, cursor, int)[0])
        rows, next_cursor = cut_page(_CURSOR, session.scalars(statement).all(), limit, lambda row: (row.number,))
        return Page[AttemptView](items=[attempt_view(row, listed=True) for row in rows], next_cursor=next_cursor)


def read_attempt(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, number: int
) -> AttemptView:
    """Raises `attempt_not_found`."""
    _check_scope(caller)
    with context.database.read() as session:
        _, run = run_named(session, caller, project_name, run_name)
        return attempt_view(attempt_numbered(session, run, number))


def _check_scope(caller: Principal) -> None:
    if Scope.TRAIN not in caller.scopes:
        caller.check_scope(Scope.READ)
