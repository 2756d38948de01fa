"""Attempts: open one, which fences every older one; what it says of itself when it has resumed, while it lives and
when it ends; and reading them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import and_, exists, select, update
from sqlalchemy.orm import Session, defer, undefer

from holdfast_protocol.attempts import (
    AttemptOpened,
    AttemptView,
    EndAttempt,
    Heartbeat,
    HeartbeatReply,
    OpenAttempt,
    ProgressReport,
    ResumedFrom,
)
from holdfast_protocol.base import Fence, Page
from holdfast_protocol.events import EventType
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restores import RestoreDecision
from holdfast_protocol.runs import Latest
from holdfast_protocol.states import AbortCause, AttemptOutcome, CheckpointState, Scope
from holdfast_protocol.text import without_secrets
from holdfast_service.audit.record import Actor
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.curves.points import take_points
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import note_change, refuse_if_went_back
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Attempt, Checkpoint, Project, Run
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import (
    announce_end,
    announce_restore,
    announce_revival,
    end_stalls,
    kept_skipped,
    why_there,
)
from holdfast_service.lineage.restore_choice import (
    AvailableStores,
    available_stores,
    choose_restore_point,
    with_environment,
    without_doubt,
)
from holdfast_service.quotas.crossings import telling_refusals
from holdfast_service.records.documents import RecordKind
from holdfast_service.records.history import settle_history
from holdfast_service.records.outbox import subject_changed
from holdfast_service.runs.views import (
    attempt_numbered,
    attempt_view,
    ensure_project,
    ensure_run,
    first_components,
    project_named,
    refuse_if_deleted,
    run_named,
)
from holdfast_service.training.abort import abort
from holdfast_service.training.crash_loop import break_crash_loop
from holdfast_service.training.fencing import (
    heartbeat_interval,
    is_of_launch,
    lock_attempt,
    lock_run,
    pass_fence,
    reached,
    revive_locked,
)
from holdfast_service.training.mistyped_names import similar_names

_SUGGESTIONS = 3


def find_or_make_run(session: Session, caller: Principal, project_name: str, run_name: str, create: bool | None) -> Run:
    """The run that an attempt is opened in: found, or made if that is what the caller wants. Raises `forbidden`,
    `project_not_found` and `run_not_found` ("did you mean").

    A mistyped name must not quietly train from scratch (rule no-silent-fresh-start): unless `create` says so, a new
    name that looks like that of a run with checkpoints is refused.
    """
    caller.check_project_name(project_name)
    project = session.scalar(select(Project).where(Project.name == project_name))
    run = None if project is None else _run_of(session, project, run_name)
    if project is not None:
        refuse_if_deleted(project, run)
    if run is not None:
        return run
    if create is None:
        _refuse_mistyped(session, caller, project_name, run_name)
    if project is None:
        project = _make_project(session, caller, project_name, create)
    if create is False:
        return run_named(session, caller, project_name, run_name)[1]
    return ensure_run(session, project, run_name, Actor.person(caller))[0]


def _run_of(session: Session, project: Project, run_name: str) -> Run | None:
    return session.scalar(select(Run).where(Run.project_id == project.id, Run.name == run_name))


def _make_project(session: Session, caller: Principal, name: str, create: bool | None) -> Project:
    """Only for tokens that may make projects; for any other the name is wrong."""
    if create is not False and caller.project_id is None and Scope.ADMIN in caller.scopes:
        return ensure_project(session, name, Actor.person(caller))
    return project_named(session, caller, name)


def _refuse_mistyped(session: Session, caller: Principal, project_name: str, run_name: str) -> None:
    committed = exists().where(Checkpoint.run_id == Run.id, Checkpoint.committed_at.is_not(None))
    living = and_(Run.deleted_at.is_(None), Project.deleted_at.is_(None))
    rows = session.execute(
        select(Project.id, Project.name, Run.name).join(Run, Run.project_id == Project.id).where(committed, living)
    )
    known = (f"{project}/{run}" for project_id, project, run in rows if caller.sees_project(project_id))
    name = f"{project_name}/{run_name}"
    meant = similar_names(name, known)[:_SUGGESTIONS]
    if meant:
        raise ProblemError(
            ProblemCode.RUN_NOT_FOUND,
            f"There is no run {name}. Did you mean {' or '.join(meant)}, which has checkpoints? Correct the name, or "
            "say that the run is new (create=True).",
            project=project_name,
            run=run_name,
            did_you_mean=meant,
        )


@dataclass(frozen=True)
class _Opened:
    attempt: int
    run_id: str
    decision: RestoreDecision
    components: list[str]
    aborted: list[str]


def open_attempt(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: OpenAttempt
) -> AttemptOpened:
    """Opens an attempt: from here on every write of an older one is refused (rules lock-order, attempt-compare-and-swap
    and no-silent-fresh-start). The same launch gets its number back.

    In one transaction, in this order: the run's row FOR UPDATE, which waits for every commit that is under way and
    holds off every new one; the number; the abort of what older attempts left uploading; and only then, in a later
    statement, the restore point. Otherwise attempt 2 is told step 800 and then 1000 commits. A checkpoint that the last
    launches have all crashed from is not offered again (`crash_loop.py`). A running job may open one too, to leave its
    own attempt and go back.

    Raises `attempt_conflict` if another attempt was opened since `after`, `stale_attempt` for a launch that was fenced
    meanwhile, `catalog_went_back`, `commits_unknown` for a run without a commit if a rebuild could not know whether it
    had one, and what finding or making the run raises.
    """
    settle_history(context)
    available = available_stores(context)
    breaks_after = context.settings.crash_loop_attempts
    with telling_refusals(context):
        opened = context.database.run(
            lambda session: _open(
                session, caller, project_name, run_name, request, available=available, breaks_after=breaks_after
            )
        )
    for checkpoint_id in opened.aborted:
        context.notifier.notify(checkpoint_id)
    return AttemptOpened(
        **dict(opened.decision),
        attempt=opened.attempt,
        epoch=context.epoch,
        run_id=opened.run_id,
        components=opened.components,
        # The advice takes a look at all that the run went through. The first heartbeat comes before any save is due.
        save_interval_seconds=context.settings.save_interval_seconds,
        heartbeat_interval_seconds=heartbeat_interval(context.settings).total_seconds(),
    )


def _open(
    session: Session,
    caller: Principal,
    project_name: str,
    run_name: str,
    request: OpenAttempt,
    *,
    available: AvailableStores | None,
    breaks_after: int,
) -> _Opened:
    refuse_if_went_back(session)
    run = find_or_make_run(session, caller, project_name, run_name, request.create)
    run = session.execute(
        select(Run).where(Run.id == run.id).with_for_update(), execution_options={"populate_existing": True}
    ).scalar_one()
    refuse_if_deleted(session.get_one(Project, run.project_id), run)
    known = run.latest_attempt
    attempt = session.scalar(select(Attempt).where(Attempt.run_id == run.id, Attempt.launch_id == request.launch_id))
    aborted: list[str] = []
    if attempt is None:
        _refuse_if_another_was_first(run, request)
        attempt, aborted = _fence_the_older(session, run, request)
    elif attempt.number != run.latest_attempt:
        raise ProblemError(
            ProblemCode.STALE_ATTEMPT,
            f"This launch was attempt {attempt.number}, and attempt {run.latest_attempt} has taken over the run. Stop "
            "this job and do not restart it.",
            attempt=attempt.number,
            latest_attempt=run.latest_attempt,
        )
    # A later statement than the lock: it sees every commit that the lock has waited for.
    decision = choose_restore_point(session, run.id, Latest(), available=available)
    decision = without_doubt(session, project_name, run_name, decision)
    if run.latest_attempt != known and request.rolls_back is None:
        decision = break_crash_loop(session, run, decision, attempts=breaks_after, available=available)
        attempt.offered_id = None if decision.restore_point is None else decision.restore_point.checkpoint_id
        attempt.skipped = kept_skipped(decision)
        if (point := decision.restore_point) is not None:
            announce_restore(
                session,
                run,
                attempt,
                EventType.RESTORE_STARTED,
                checkpoint_id=point.checkpoint_id,
                step=point.step,
                reason=why_there(decision),
            )
    if run.latest_attempt != known:
        subject_changed(session, RecordKind.RUN, run.id, run.project_id)
        note_change(session, f"attempt {attempt.number} of {project_name}/{run_name} was opened")
    decision = with_environment(session, run.id, decision)
    return _Opened(attempt.number, run.id, decision, first_components(session, run.id), aborted)


def _refuse_if_another_was_first(run: Run, request: OpenAttempt) -> None:
    if request.rolls_back not in (None, request.after):
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"A job goes back from its own attempt, and this one names attempt {request.rolls_back} and opens after "
            f"{request.after}. Give the same number in both.",
        )
    if request.after == run.latest_attempt:
        return
    raise ProblemError(
        ProblemCode.ATTEMPT_CONFLICT,
        f"The newest attempt of this run is {run.latest_attempt}, and this launch knows of {request.after}: another "
        "launch was opened in between. Look whether it is meant to run; to take over, launch again.",
        latest_attempt=run.latest_attempt,
        after=request.after,
    )


def _fence_the_older(session: Session, run: Run, request: OpenAttempt) -> tuple[Attempt, list[str]]:
    """The new attempt, and the ids of the checkpoints that were given up for it."""
    now = database_now(session)
    number = run.latest_attempt + 1
    run.latest_attempt = number
    aborted = _abort_uploading(session, run, number, now)
    fenced = session.scalars(
        update(Attempt)
        .where(Attempt.run_id == run.id, Attempt.ended_at.is_(None))
        .values(ended_at=now, outcome=AttemptOutcome.FENCED, outcome_detail=f"attempt {number} has taken over")
        .returning(Attempt.id),
        execution_options={"synchronize_session": False},
    ).all()
    end_stalls(session, fenced)
    if request.rolls_back is not None:
        session.execute(
            update(Attempt)
            .where(Attempt.run_id == run.id, Attempt.number == request.rolls_back)
            .values(rolled_back_at=now, outcome_detail=f"left by its own job, which went back as attempt {number}"),
            execution_options={"synchronize_session": False},
        )
    attempt = Attempt(
        run_id=run.id,
        number=number,
        launch_id=request.launch_id,
        world_size=request.world_size,
        host=request.host,
        environment=dict(request.environment),
        config=request.config,
        opened_at=now,
        heartbeat_at=now,
    )
    session.add(attempt)
    session.flush()
    return attempt, aborted


def _abort_uploading(session: Session, run: Run, number: int, now: datetime) -> list[str]:
    uploading = session.scalars(
        select(Checkpoint)
        .where(
            Checkpoint.run_id == run.id,
            Checkpoint.state == CheckpointState.UPLOADING,
            ~Checkpoint.detached,  # a branch is never the restore point, whenever it commits
        )
        .order_by(Checkpoint.id)
        .with_for_update(),
        execution_options={"populate_existing": True},
    ).all()
    for checkpoint in uploading:
        abort(session, checkpoint, f"fenced by attempt {number}", now, cause=AbortCause.FENCED)
    session.flush()
    return [checkpoint.id for checkpoint in uploading]


def record_resumed_from(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: ResumedFrom
) -> AttemptView:
    """What the ranks have really loaded: the lineage follows it (rule latest-follows-lineage). `rollback` cuts the line
    here. Raises `checkpoint_not_found` for another run's, and `invalid_request` for one never
    committed or once this attempt has committed on from elsewhere."""
    with context.database.transaction() as session:
        fenced = pass_fence(session, lock_run(session, caller, project_name, run_name), request, context.epoch)
        run, attempt = fenced.run, fenced.attempt
        if not _is_own(session, run, attempt, request):
            if attempt.resumed_from_id != request.checkpoint_id:
                _refuse_if_cut(attempt)
                attempt.resumed_from_id = request.checkpoint_id
                attempt.skipped = _skipped_after_all(session, run, attempt, request)
            if request.rollback and attempt.cut_at is None:
                attempt.cut_at = database_now(session)
            session.flush()
            subject_changed(session, RecordKind.RUN, run.id, run.project_id)
            note_change(session, f"attempt {attempt.number} of {project_name}/{run_name} resumed")
            if request.checkpoint_id is not None:
                step = session.scalar(select(Checkpoint.step).where(Checkpoint.id == request.checkpoint_id))
                announce_restore(
                    session, run, attempt, EventType.RESTORE_FINISHED, checkpoint_id=request.checkpoint_id, step=step
                )
        return attempt_view(attempt)


def _skipped_after_all(
    session: Session, run: Run, attempt: Attempt, request: ResumedFrom
) -> list[dict[str, Any]] | None:
    """What stood in the way of the checkpoint that the ranks have loaded, where it is not the one that was offered: a
    late save was adopted, or a rank could not read the offered one. None: not known, or a person has gone back."""
    if attempt.skipped is None or request.checkpoint_id == attempt.offered_id:
        return attempt.skipped
    if request.rollback or request.checkpoint_id is None:
        return None
    again = choose_restore_point(session, run.id, Latest())
    is_newest = again.restore_point is not None and again.restore_point.checkpoint_id == request.checkpoint_id
    return kept_skipped(again) if is_newest else None


def _is_own(session: Session, run: Run, attempt: Attempt, request: ResumedFrom) -> bool:
    """Whether it is a checkpoint of this very attempt, which lies on its line already and changes nothing."""
    if request.checkpoint_id is None:
        return False
    checkpoint = session.get(Checkpoint, request.checkpoint_id)
    if checkpoint is None or checkpoint.run_id != run.id:
        raise ProblemError(
            ProblemCode.CHECKPOINT_NOT_FOUND,
            f"This run has no checkpoint {request.checkpoint_id}. To start from another run's weights, load them "
            "without resuming.",
            checkpoint_id=request.checkpoint_id,
        )
    if checkpoint.committed_at is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The checkpoint {checkpoint.id} was never committed, so nothing can have been resumed from it.",
            checkpoint_id=checkpoint.id,
        )
    own = checkpoint.attempt_number == attempt.number
    if own and request.rollback:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"Step {checkpoint.step} is this attempt's own. To go back to it, launch the job again: a new attempt can "
            "roll back to any step.",
            checkpoint_id=checkpoint.id,
        )
    return own


def _refuse_if_cut(attempt: Attempt) -> None:
    if attempt.cut_at is not None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"Attempt {attempt.number} has its own line already, from another checkpoint. Launch the job again to "
            "resume from elsewhere.",
            attempt=attempt.number,
            resumed_from=attempt.resumed_from_id,
        )


_LONGEST_AGE_SECONDS = 3650 * 86400.0
_SLOWEST_RATE = 1e-9  # a tiny one overflows where a query divides by it, and with it the figures of all projects


def take_progress_report(session: Session, attempt: Attempt, told: ProgressReport, now: datetime) -> None:
    """What an attempt tells of itself, in a heartbeat or with its end, goes into its row, which the caller has locked.
    An older report changes nothing: a call that was held up may arrive late, and a rank may be behind another."""
    attempt.heartbeat_at = now
    if told.step is not None:
        reached(session, attempt, told.step, locked=True)
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
        attempt.steps_per_second = told.steps_per_second if told.steps_per_second >= _SLOWEST_RATE else 0.0
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


@contextmanager
def hearing_the_refused(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, fence: Fence
) -> Iterator[None]:
    """A fenced attempt that calls was still alive when it was fenced: the service notes what the fence refuses. Around
    the transaction that may be refused, which has left nothing. Should this process die before the note, the attempt's
    next call leaves it."""
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
        if attempt.outcome == AttemptOutcome.LOST:
            announce_revival(session, attempt, run.project_id, "it has called, after another attempt had taken over")
        if attempt.rolled_back_at is None:
            attempt.outcome = AttemptOutcome.FENCED
            attempt.outcome_detail = f"attempt {attempt.number + 1} has taken over while it was still alive"


def take_heartbeat(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: Heartbeat
) -> HeartbeatReply:
    """An attempt is alive, and how far it has come. The reply tells how often to save. Raises `stale_attempt`: a fenced
    job then learns of it also while it saves nothing."""
    with (
        hearing_the_refused(context, caller, project_name, run_name, request),
        context.database.transaction() as session,
    ):
        fenced = pass_fence(session, lock_run(session, caller, project_name, run_name), request, context.epoch)
        run, attempt, now = fenced.run, fenced.attempt, fenced.now
        lock_attempt(session, attempt)
        revive_locked(session, attempt, run.project_id)
        take_progress_report(session, attempt, request, now)
        left_out = take_points(session, run.id, attempt.number, request.metrics)
    return HeartbeatReply(save_interval_seconds=context.save_advice.interval_seconds(run.id), metrics_left_out=left_out)


def end_attempt(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: EndAttempt
) -> AttemptView:
    """An attempt says how it ended. The reaper aborts what it leaves uploading. The first word counts, and a repeated
    one changes nothing; only an attempt that was thought lost is corrected.

    A rank that crashed tells so at once. What the others then meet, torn down by their launcher, comes later, and adds
    only how far they had come.
    """
    with (
        hearing_the_refused(context, caller, project_name, run_name, request),
        context.database.transaction() as session,
    ):
        fenced = pass_fence(session, lock_run(session, caller, project_name, run_name), request, context.epoch)
        run, attempt = fenced.run, fenced.attempt
        lock_attempt(session, attempt)
        now = database_now(session)
        take_progress_report(session, attempt, request, now)
        take_points(session, run.id, attempt.number, request.metrics)
        if attempt.outcome is None or attempt.outcome == AttemptOutcome.LOST:
            if attempt.outcome is not None:
                announce_revival(session, attempt, run.project_id, "it has told its end")
            attempt.ended_at = now
            attempt.outcome = request.outcome
            attempt.outcome_detail = without_secrets(request.detail) or None
            attempt.error_type = request.error_type
            attempt.error_rank = request.error_rank
            attempt.notice = None if request.notice is None else request.notice.model_dump()
            session.flush()
            if attempt.stalled_at is not None:
                end_stalls(session, [attempt.id])
            announce_end(session, run, attempt, now)
            subject_changed(session, RecordKind.RUN, run.id, run.project_id)
        return attempt_view(attempt)


_CURSOR = "attempts"


def list_attempts(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, *, cursor: str | None, limit: int
) -> Page[AttemptView]:
    """The newest first. For tokens that read and for those that train: a launch asks for the newest number."""
    with context.database.read() as session:
        _, run = run_named(session, caller, project_name, run_name)
        # A page of environments is much, and of no use: the view of one attempt shows its own.
        statement = (
            select(Attempt)
            .options(defer(Attempt.environment), undefer(Attempt.skipped))
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
    with context.database.read() as session:
        _, run = run_named(session, caller, project_name, run_name)
        return attempt_view(attempt_numbered(session, run, number))
