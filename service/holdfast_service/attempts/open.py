"""Open an attempt: from here on every write of an older one is refused (protocol rules 1, 2 and 20).

In one transaction, in this order: the run's row FOR UPDATE, which waits for every commit that is under way and holds
off every new one; the number; the abort of what older attempts left uploading; and only then, in a later statement, the
restore point. Otherwise attempt 2 is told step 800 and then 1000 commits. What the last launches have all crashed from
is not offered again (`quarantine.py`). A running job may open one too, to leave its own attempt and go back.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast_protocol.attempts import AttemptOpened, OpenAttempt
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restore import RestoreDecision
from holdfast_protocol.selectors import Latest
from holdfast_protocol.states import AbortCause, AttemptOutcome, CheckpointState
from holdfast_service.attempts.find_or_make import find_or_make_run
from holdfast_service.attempts.quarantine import break_crash_loop
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.aborting import abort
from holdfast_service.catalog.declared import first_components
from holdfast_service.catalog.doubts import without_doubt
from holdfast_service.catalog.history import settle_history
from holdfast_service.catalog.memory import note_change
from holdfast_service.catalog.reach import Reach, reach_of
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.resolve import refuse_if_deleted
from holdfast_service.catalog.restore_choice import choose_restore_point
from holdfast_service.catalog.tables import Attempt, Checkpoint, Project, Run
from holdfast_service.catalog.went_back import refuse_if_went_back
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


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
    """The same launch gets its number back. Raises `attempt_conflict` if another attempt was opened since `after`,
    `stale_attempt` for a launch that was fenced meanwhile, `catalog_went_back`, `commits_unknown` for a run without a
    commit of which a rebuild could not know whether it had one, and what finding or making the run raises.
    """
    settle_history(context)
    reach = reach_of(context)
    breaks_after = context.settings.crash_loop_attempts
    opened = context.database.run(
        lambda session: _open(session, caller, project_name, run_name, request, reach=reach, breaks_after=breaks_after)
    )
    for checkpoint_id in opened.aborted:
        context.notifier.notify(checkpoint_id)
    return AttemptOpened(
        attempt=opened.attempt,
        epoch=context.epoch,
        run_id=opened.run_id,
        restore_point=opened.decision.restore_point,
        passed_over=opened.decision.passed_over,
        ever_committed=opened.decision.ever_committed,
        components=opened.components,
        note=opened.decision.note,
        save_interval_seconds=context.save_advice.interval_seconds(opened.run_id),
        heartbeat_interval_seconds=context.settings.heartbeat_interval_seconds,
    )


def _open(
    session: Session,
    caller: Principal,
    project_name: str,
    run_name: str,
    request: OpenAttempt,
    *,
    reach: Reach | None,
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
    decision = choose_restore_point(session, run.id, Latest(), reach=reach)
    decision = without_doubt(session, project_name, run_name, decision)
    if run.latest_attempt != known and request.rolls_back is None:
        decision = break_crash_loop(session, run, decision, attempts=breaks_after, reach=reach)
        attempt.offered_id = None if decision.restore_point is None else decision.restore_point.checkpoint_id
    if run.latest_attempt != known:
        subject_changed(session, RecordKind.RUN, run.id, run.project_id)
        note_change(session, f"attempt {attempt.number} of {project_name}/{run_name} was opened")
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
    session.execute(
        update(Attempt)
        .where(Attempt.run_id == run.id, Attempt.ended_at.is_(None))
        .values(ended_at=now, outcome=AttemptOutcome.FENCED, outcome_detail=f"attempt {number} has taken over"),
        execution_options={"synchronize_session": False},
    )
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
            ~Checkpoint.off_line,  # a branch is never the restore point, whenever it commits
        )
        .order_by(Checkpoint.id)
        .with_for_update(),
        execution_options={"populate_existing": True},
    ).all()
    for checkpoint in uploading:
        abort(checkpoint, f"fenced by attempt {number}", now, cause=AbortCause.FENCED)
    session.flush()
    return [checkpoint.id for checkpoint in uploading]
