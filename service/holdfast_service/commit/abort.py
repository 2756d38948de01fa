"""The job gives a checkpoint up. Repeating it is fine; what is committed stays committed."""

from __future__ import annotations

from holdfast_protocol.checkpoints import AbortCheckpoint, CheckpointView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.redaction import without_secrets
from holdfast_protocol.states import AbortCause, CheckpointState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.aborting import abort
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.catalog.writing import begin_writing
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def abort_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: AbortCheckpoint
) -> CheckpointView:
    """Raises `checkpoint_conflict` if it has committed meanwhile."""
    reason = without_secrets(request.reason)
    with context.database.transaction() as session:
        writing = begin_writing(session, caller, checkpoint_id, request, context.epoch, lock=True)
        checkpoint = writing.checkpoint
        if checkpoint.state == CheckpointState.UPLOADING:
            abort(checkpoint, reason, database_now(session), cause=AbortCause.JOB)
            record_event(
                session,
                Actor.person(caller),
                "checkpoint.abort",
                project_id=writing.project.id,
                run_id=writing.run.id,
                checkpoint_id=checkpoint_id,
                reason=reason,
            )
            session.flush()
        elif checkpoint.state != CheckpointState.ABORTED:
            raise ProblemError(
                ProblemCode.CHECKPOINT_CONFLICT,
                f"Step {checkpoint.step} is {checkpoint.state} and cannot be aborted any more. Delete it, if it is not "
                "wanted.",
                checkpoint_id=checkpoint_id,
                state=checkpoint.state,
            )
        view = current_checkpoint_view(session, writing.project.name, writing.run.name, checkpoint)
    context.notifier.notify(checkpoint_id)
    return view
