"""Places a hold on a checkpoint that is committed or in the trash. Several people may hold the same one.

The checkpoint's lock decides against trash and purge: who comes second sees what the first did. What is in the trash
stays there and is not purged.
"""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.holds import HoldKind, HoldView, PlaceHold
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.custody_tables import Hold
from holdfast_service.catalog.held import in_force
from holdfast_service.catalog.resolve import checkpoint_by_id, locked_checkpoint
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.holds.view import hold_view
from holdfast_service.stores.object_lock import LockingStore

_HELD_STATES = (CheckpointState.COMMITTED, CheckpointState.TRASHED)


def place_hold(context: ServiceContext, caller: Principal, checkpoint_id: str, request: PlaceHold) -> HoldView:
    """The same hold by the same token is the one that is in force. Raises `checkpoint_not_found`,
    `checkpoint_conflict` for what is not committed, `invalid_request` for a time that is over and for a mirror that no
    store can give, and what asking the store raises.
    """
    if request.mirror:
        _refuse_without_object_lock(context)
    until = _whole_seconds(request.retain_until)
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        _refuse_unfit(checkpoint)
        now = database_now(session)
        if until is not None and until <= now:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                f"{until:%Y-%m-%d %H:%M} UTC is over, and it is {now:%Y-%m-%d %H:%M} now. Name a time to come.",
            )
        wanted = Hold(
            id=f"hd_{secrets.token_hex(6)}",
            checkpoint_id=checkpoint_id,
            kind=HoldKind.LEGAL if until is None else HoldKind.RETAIN_UNTIL,
            reason=request.reason,
            retain_until=until,
            mirror=request.mirror,
            placed_at=now,
            placed_by_token=caller.token_id,
            placed_by=caller.name,
        )
        hold = _same(session, wanted, now)
        if hold is None:
            hold = wanted
            session.add(hold)
            checkpoint.version += 1
            record_event(
                session,
                Actor.person(caller),
                "hold.place",
                project_id=project.id,
                run_id=run.id,
                checkpoint_id=checkpoint_id,
                reason=request.reason,
                after={
                    "hold": hold.id,
                    "kind": hold.kind,
                    "retain_until": None if until is None else until.isoformat(),
                    "mirror": request.mirror,
                },
            )
            session.flush()
        return hold_view(hold, checkpoint, run, project, now)


def _same(session: Session, wanted: Hold, now: datetime) -> Hold | None:
    """A reply may be lost: the call comes again and must not leave two holds to release."""
    until = wanted.retain_until
    return session.scalar(
        select(Hold)
        .where(
            Hold.checkpoint_id == wanted.checkpoint_id,
            Hold.placed_by_token == wanted.placed_by_token,
            Hold.reason == wanted.reason,
            Hold.mirror == wanted.mirror,
            Hold.retain_until.is_(None) if until is None else Hold.retain_until == until,
            in_force(now),
        )
        .limit(1)
    )


def _refuse_unfit(checkpoint: Checkpoint) -> None:
    if checkpoint.state in _HELD_STATES:
        return
    what = {
        CheckpointState.UPLOADING: "is still uploading and may never commit. Hold it once it is committed",
        CheckpointState.ABORTED: "was aborted: there is nothing to keep. Hold another step",
    }.get(CheckpointState(checkpoint.state), "is deleted, and its bytes are gone or going. Hold another step")
    raise ProblemError(
        ProblemCode.CHECKPOINT_CONFLICT,
        f"Step {checkpoint.step} {what}.",
        checkpoint_id=checkpoint.id,
        state=checkpoint.state,
    )


def _refuse_without_object_lock(context: ServiceContext) -> None:
    for attached in context.stores:
        if isinstance(attached.store, LockingStore) and attached.store.has_object_lock():
            return
    raise ProblemError(
        ProblemCode.INVALID_REQUEST,
        "No store of this service has Object Lock, so the hold cannot be mirrored. Enable it on the S3 bucket (without "
        "a default retention), or place the hold without `mirror`: the service keeps it all the same.",
    )


def _whole_seconds(moment: datetime | None) -> datetime | None:
    """Rounded up, so that what is shown is what is kept."""
    if moment is None or moment.microsecond == 0:
        return moment
    return moment.replace(microsecond=0) + timedelta(seconds=1)
