"""A person's edit: labels, and health with its reason. Only onto the version that the person has seen."""

from __future__ import annotations

from typing import Any

from holdfast_protocol.checkpoints import CheckpointView, EditCheckpoint
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.resolve import checkpoint_by_id, locked_checkpoint
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.catalog.views import current_checkpoint_view
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError


def edit_checkpoint(
    context: ServiceContext, caller: Principal, checkpoint_id: str, request: EditCheckpoint, if_match: str | None
) -> CheckpointView:
    """Raises `checkpoint_not_found`, `edit_conflict`, `checkpoint_conflict` and `invalid_request`."""
    _refuse_senseless(request, if_match)
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        if if_match not in (f'"{checkpoint.version}"', "*"):
            raise ProblemError(
                ProblemCode.EDIT_CONFLICT,
                "The checkpoint was changed since it was read. Read it again and decide anew.",
                etag=f'"{checkpoint.version}"',
            )
        before = _edited(checkpoint)
        if request.health is not None:
            _refuse_unfit_health(checkpoint)
            checkpoint.health = request.health
            checkpoint.health_reason = None if request.health is Health.OK else request.health_reason
        if request.labels is not None:
            checkpoint.labels = sorted(set(request.labels))
        checkpoint.version += 1
        after = _edited(checkpoint)
        changed = [name for name in after if after[name] != before[name]]
        record_event(
            session,
            Actor.person(caller),
            "checkpoint.edit",
            project_id=project.id,
            run_id=run.id,
            checkpoint_id=checkpoint.id,
            reason=request.health_reason,
            before={name: before[name] for name in changed},
            after={name: after[name] for name in changed},
        )
        session.flush()
        return current_checkpoint_view(session, project.name, run.name, checkpoint)


def _edited(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "labels": list(checkpoint.labels),
        "health": str(checkpoint.health),
        "health_reason": checkpoint.health_reason,
    }


def _refuse_senseless(request: EditCheckpoint, if_match: str | None) -> None:
    if if_match is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            "An edit needs the version that was seen. Send the checkpoint's `etag` as the header If-Match.",
        )
    if request.health not in (None, Health.OK) and not request.health_reason:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST, "This health needs a reason that others will read. Give health_reason."
        )


def _refuse_unfit_health(checkpoint: Checkpoint) -> None:
    if checkpoint.health == Health.CORRUPT:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Step {checkpoint.step} is corrupt: the service found bytes of it lost. It becomes ok by itself once its "
            "chunks are whole again; no edit makes it so.",
        )
    if checkpoint.state != CheckpointState.COMMITTED:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Step {checkpoint.step} is {checkpoint.state}, and only a committed checkpoint has a health to edit.",
        )
