"""A person wants a cold checkpoint to be readable for some days. It is only written down; the controller does it."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState, Health, Tier
from holdfast_protocol.tiers import RequestThaw, StorageClass, ThawSpeed, ThawView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.cold_words import takes_words
from holdfast_service.catalog.readable import refuse_unless_whole
from holdfast_service.catalog.resolve import checkpoint_by_id, locked_checkpoint
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.tiers.thaw_view import Standing, standing_of, thaw_view


def request_thaw(context: ServiceContext, caller: Principal, checkpoint_id: str, request: RequestThaw) -> ThawView:
    """Repeatable: it prolongs, and never shortens. Raises `checkpoint_not_found`, `checkpoint_conflict`,
    `invalid_request` for a speed that a class does not have, and what refuse_unless_whole raises."""
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        _refuse_unfit(checkpoint)
        standing = standing_of(session, context, checkpoint)
        _refuse_speed(standing, request.speed)
        before = {"tier": checkpoint.tier, "thawed_until": _text(checkpoint.thawed_until)}
        _write_down(session, checkpoint, standing, request)
        session.flush()
        record_event(
            session,
            Actor.person(caller),
            "checkpoint.thaw",
            project_id=project.id,
            run_id=run.id,
            checkpoint_id=checkpoint.id,
            before=before,
            after={
                "tier": checkpoint.tier,
                "thawed_until": _text(checkpoint.thawed_until),
                "days": request.days,
                "speed": request.speed.value,
            },
        )
        return thaw_view(session, checkpoint, standing)


def show_thaw(context: ServiceContext, caller: Principal, checkpoint_id: str) -> ThawView:
    """Raises `checkpoint_not_found`, and what refuse_unless_whole raises."""
    with context.database.read() as session:
        _, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        return thaw_view(session, checkpoint, standing_of(session, context, checkpoint))


def _refuse_unfit(checkpoint: Checkpoint) -> None:
    refuse_unless_whole(checkpoint)
    if checkpoint.state != CheckpointState.COMMITTED:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Step {checkpoint.step} is in the trash. Take it out with `holdfast trash restore` before it is thawed.",
        )
    if checkpoint.health == Health.CORRUPT:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Step {checkpoint.step} is corrupt: {checkpoint.health_reason} A thaw would cost and not give it back. "
            "Thaw another one.",
        )


def _refuse_speed(standing: Standing, speed: ThawSpeed) -> None:
    takes = standing.takes_seconds()
    if not standing.classes or speed in takes:
        return
    slowest = max(standing.classes, key=list(StorageClass).index)
    raise ProblemError(
        ProblemCode.INVALID_REQUEST,
        f"Nothing in {slowest.value} is thawed at the speed {speed.value}. Take another one: {takes_words(slowest)}.",
        speeds=[each.value for each in takes],
    )


def _write_down(session: Session, checkpoint: Checkpoint, standing: Standing, request: RequestThaw) -> None:
    now = database_now(session)
    seconds = standing.takes_seconds().get(request.speed, 0)
    expected_at = now + timedelta(seconds=seconds)
    cold = standing.readable < standing.chunks
    if checkpoint.thawed_until is None or checkpoint.tier == Tier.HOT:
        checkpoint.thaw_requested_at = now
        # What is copied back from a folder takes as long as that takes: nobody has promised anything.
        checkpoint.thaw_expected_at = expected_at if seconds or not cold else None
    ends_at = (checkpoint.thaw_expected_at or now) + timedelta(days=request.days)
    checkpoint.thawed_until = max(ends_at, checkpoint.thawed_until or ends_at)
    checkpoint.thaw_days = max(request.days, checkpoint.thaw_days or 0)
    checkpoint.thaw_speed = request.speed
    if checkpoint.tier == Tier.COLD or (cold and checkpoint.tier == Tier.HOT):
        checkpoint.tier = Tier.THAWING
    checkpoint.version += 1


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
