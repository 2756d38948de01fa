"""What the ranks have really loaded: the line of descent follows it (protocol rule 3)."""

from __future__ import annotations

from sqlalchemy.orm import Session

from holdfast_protocol.attempts import AttemptView, ResumedFrom
from holdfast_protocol.problems import ProblemCode
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.fencing import pass_fence
from holdfast_service.catalog.memory import note_change
from holdfast_service.catalog.record_names import RecordKind
from holdfast_service.catalog.record_outbox import subject_changed
from holdfast_service.catalog.resolve import run_named
from holdfast_service.catalog.tables import Attempt, Checkpoint, Run
from holdfast_service.catalog.views import attempt_view
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def record_resumed_from(
    context: ServiceContext, caller: Principal, project_name: str, run_name: str, request: ResumedFrom
) -> AttemptView:
    """`rollback` cuts the line here. Raises `checkpoint_not_found` for one that is not of this run, and
    `invalid_request` for one that was never committed or once this attempt has committed on from elsewhere.
    """
    with context.database.transaction() as session:
        _, run = run_named(session, caller, project_name, run_name, deleted=True)
        _, attempt = pass_fence(session, run.id, request, context.epoch)
        if not _is_own(session, run, attempt, request):
            if attempt.resumed_from_id != request.checkpoint_id:
                _refuse_if_cut(attempt)
                attempt.resumed_from_id = request.checkpoint_id
            if request.rollback and attempt.cut_at is None:
                attempt.cut_at = database_now(session)
            session.flush()
            subject_changed(session, RecordKind.RUN, run.id, run.project_id)
            note_change(session, f"attempt {attempt.number} of {project_name}/{run_name} resumed")
        return attempt_view(attempt)


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
