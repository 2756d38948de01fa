"""Pins: a person's word that a checkpoint stays, with a reason and perhaps an end. No policy expires it meanwhile, no
person deletes it, and nothing of it is purged."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.pruning import PinCheckpoint
from holdfast_protocol.states import CheckpointState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.errors import ProblemError, refuse_unless_seen
from holdfast_service.runs.views import checkpoint_by_id, current_checkpoint_view, locked_checkpoint


def pin_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: PinCheckpoint, if_match: str | None
) -> CheckpointView:
    """A second pin takes the place of the first, if its version was seen. Raises `checkpoint_not_found`,
    `checkpoint_conflict` for an uncommitted one, `edit_needs_version` and `edit_conflict`."""
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        if checkpoint.state != CheckpointState.COMMITTED:
            raise ProblemError(
                ProblemCode.CHECKPOINT_CONFLICT,
                f"Step {checkpoint.step} is {checkpoint.state}, and only a committed checkpoint can be pinned. What is "
                "in the trash can be taken back first with `holdfast checkpoints undelete`.",
                checkpoint_id=checkpoint_id,
            )
        now = database_now(session)
        until = None if request.expires_in_seconds is None else now + timedelta(seconds=request.expires_in_seconds)
        pinned = (checkpoint.pinned_by, checkpoint.pin_reason, checkpoint.pinned_until)
        if pinned != (caller.name, request.reason, until):
            before = _shown(checkpoint)
            if pinned_now(session, checkpoint) and not _only_longer(checkpoint, caller, request, until):
                refuse_unless_seen("the pin", f'"{checkpoint.version}"', if_match, look="Read the checkpoint")
            set_pin(checkpoint, caller.name, request.reason, now, until)
            checkpoint.version += 1
            record_event(
                session,
                Actor.person(caller),
                "checkpoint.pin",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint_id,
                reason=request.reason,
                before=before,
                after=_shown(checkpoint),
            )
        session.flush()
        return current_checkpoint_view(session, project.name, run.name, checkpoint)


def unpin_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, if_match: str | None
) -> CheckpointView:
    """Twice is fine. Raises `checkpoint_not_found`, `edit_needs_version` and `edit_conflict`."""
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        if checkpoint.pinned_at is not None:
            if pinned_now(session, checkpoint):
                refuse_unless_seen("the pin", f'"{checkpoint.version}"', if_match, look="Read the checkpoint")
            before = _shown(checkpoint)
            checkpoint.pinned_at = checkpoint.pinned_by = checkpoint.pin_reason = checkpoint.pinned_until = None
            checkpoint.version += 1
            record_event(
                session,
                Actor.person(caller),
                "checkpoint.unpin",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint_id,
                before=before,
            )
        session.flush()
        return current_checkpoint_view(session, project.name, run.name, checkpoint)


def set_pin(checkpoint: Checkpoint, by: str, reason: str, now: datetime, until: datetime | None) -> None:
    checkpoint.pinned_at = now
    checkpoint.pinned_by = by
    checkpoint.pin_reason = reason
    checkpoint.pinned_until = until


def pinned_now(session: Session, checkpoint: Checkpoint) -> bool:
    until = checkpoint.pinned_until
    return checkpoint.pinned_at is not None and (until is None or until > database_now(session))


def _only_longer(checkpoint: Checkpoint, caller: Principal, request: PinCheckpoint, until: datetime | None) -> bool:
    """The caller's own pin, again: the reply may have been lost. It takes nothing away from other callers."""
    same = (checkpoint.pinned_by, checkpoint.pin_reason) == (caller.name, request.reason)
    return same and (until is None or (checkpoint.pinned_until is not None and until >= checkpoint.pinned_until))


def _shown(checkpoint: Checkpoint) -> dict[str, str | None] | None:
    if checkpoint.pinned_at is None:
        return None
    until = checkpoint.pinned_until
    return {
        "by": checkpoint.pinned_by,
        "reason": checkpoint.pin_reason,
        "until": None if until is None else until.isoformat(),
    }
