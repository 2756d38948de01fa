"""Trashed -> committed, until the purge begins (protocol rule 26).

What a policy expired it would expire again in minutes, so it is pinned for a while unless the caller says otherwise.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import UndeleteCheckpoint
from holdfast_protocol.states import CheckpointState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.resolve import checkpoint_by_id, locked_checkpoint, refuse_if_deleted
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.retention.pin import pinned_now, set_pin
from holdfast_service.retention.trash import lock_run

_PIN_REASON = "taken back from the trash"
_LIVE = (CheckpointState.UPLOADING, CheckpointState.COMMITTED)


def undelete_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: UndeleteCheckpoint
) -> CheckpointView:
    """Of one that is committed nothing changes: twice is fine. Raises `checkpoint_not_found`, `run_not_found` where the
    whole run was deleted, `chunk_gone` once its purge has begun, and `checkpoint_conflict` if the same step was saved
    anew or it was never in the trash."""
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        # Whoever begins the same step anew passes the fence, which waits for this.
        refuse_if_deleted(project, lock_run(session, run.id))
        checkpoint = locked_checkpoint(session, checkpoint_id)
        if checkpoint.state != CheckpointState.COMMITTED:
            _refuse_unless_in_trash(checkpoint)
            _refuse_if_saved_anew(session, checkpoint)
            _take_back(session, context, caller, checkpoint, request)
            record_event(
                session,
                Actor.person(caller),
                "checkpoint.undelete",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint_id,
                before={"state": CheckpointState.TRASHED.value},
                after={"state": CheckpointState.COMMITTED.value, "pinned": pinned_now(session, checkpoint)},
            )
        session.flush()
        return current_checkpoint_view(session, project.name, run.name, checkpoint)


def _take_back(
    session: Session, context: ServiceContext, caller: Principal, checkpoint: Checkpoint, request: UndeleteCheckpoint
) -> None:
    pin = checkpoint.trashed_by == "policy" if request.pin is None else request.pin
    if pin and not pinned_now(session, checkpoint):
        now = database_now(session)
        # As long as a person's own deletion can be thought over.
        until = now + timedelta(seconds=context.settings.trash_person_seconds)
        set_pin(checkpoint, caller.name, _PIN_REASON, now, until)
    out_of_trash(checkpoint)


def out_of_trash(checkpoint: Checkpoint) -> None:
    """The caller has its lock, and has seen it in the trash."""
    checkpoint.state = CheckpointState.COMMITTED
    checkpoint.trashed_at = checkpoint.trashed_by = checkpoint.trash_reason = checkpoint.purge_at = None
    checkpoint.version += 1


def _refuse_unless_in_trash(checkpoint: Checkpoint) -> None:
    if checkpoint.state == CheckpointState.TRASHED:
        return
    if checkpoint.state in (CheckpointState.DELETING, CheckpointState.DELETED):
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The purge of step {checkpoint.step} has begun, and its bytes are going. It cannot be taken back.",
            checkpoint_id=checkpoint.id,
            state=checkpoint.state,
        )
    raise ProblemError(
        ProblemCode.CHECKPOINT_CONFLICT,
        f"Step {checkpoint.step} is {checkpoint.state} and not in the trash. `holdfast trash list` shows what is.",
        checkpoint_id=checkpoint.id,
        state=checkpoint.state,
    )


def _refuse_if_saved_anew(session: Session, checkpoint: Checkpoint) -> None:
    anew = session.scalar(
        select(Checkpoint.id).where(
            Checkpoint.run_id == checkpoint.run_id,
            Checkpoint.attempt_number == checkpoint.attempt_number,
            Checkpoint.step == checkpoint.step,
            Checkpoint.off_line == checkpoint.off_line,
            Checkpoint.state.in_(_LIVE),
        )
    )
    if anew is not None:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Attempt {checkpoint.attempt_number} has saved step {checkpoint.step} anew as {anew}. Delete that one "
            "first, if this one is the better.",
            checkpoint_id=checkpoint.id,
            saved_anew=anew,
        )
