"""A person wants a cold checkpoint to be readable for some days. It is only written down; the controller does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState, CopyState, Health, Tier
from holdfast_protocol.tiers import ClassTerms, RequestThaw, StorageClass, ThawSpeed, ThawState, ThawView
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.cold import takes_words
from holdfast_service.copies.predicates import may_keep
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Project, Run, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.runs.views import checkpoint_by_id, locked_checkpoint, refuse_unless_whole
from holdfast_service.stores.base import ClassedStore
from holdfast_service.tiers.movable import is_out_of_the_cold

_GIB = 1024**3


@dataclass
class ThawProgress:
    """A checkpoint's distinct chunks, counted. `classes`: by the archive class of what cannot be read, its stored
    bytes. `terms`: what its store documents of that class."""

    chunks: int = 0
    readable: int = 0
    thawing: int = 0
    cold_bytes: int = 0
    classes: dict[StorageClass, int] = field(default_factory=dict)
    terms: dict[StorageClass, ClassTerms] = field(default_factory=dict)

    def takes_seconds(self) -> dict[ThawSpeed, int]:
        """By speed that every class has; the slowest counts."""
        speeds = [set(self.terms[each].thaw_seconds) for each in self.classes]
        common = set(ThawSpeed).intersection(*speeds) if speeds else set()
        return {
            speed: max(self.terms[each].thaw_seconds[speed] for each in self.classes)
            for speed in ThawSpeed
            if speed in common
        }

    def costs_dollars(self) -> dict[ThawSpeed, float]:
        return {
            speed: round(
                sum(self.terms[each].retrieval_dollars[speed] * size / _GIB for each, size in self.classes.items()), 4
            )
            for speed in self.takes_seconds()
        }


def thaw_progress(session: Session, context: ServiceContext, checkpoint: Checkpoint) -> ThawProgress:
    """How a checkpoint can be read now, and what a thaw would take: looked up in its chunks' copies, not remembered. It
    reads every chunk: callers ask for one checkpoint at a time."""
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint.id)
    needed = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists)).distinct().subquery()
    until = database_now(session) + timedelta(seconds=context.settings.ticket_seconds)
    rows = session.execute(
        select(
            needed.c.chunk_id,
            Copy.state,
            Copy.store_id,
            Copy.storage_class,
            Copy.stored_bytes,
            is_out_of_the_cold(context, checkpoint.attempt_id, until=until, copy=Copy).label("is_readable"),
            may_keep(checkpoint.attempt_id).label("may_keep"),
        )
        .outerjoin(Copy, (Copy.chunk_id == needed.c.chunk_id) & Copy.store_id.in_(context.store_ids))
        .order_by(needed.c.chunk_id)
    )
    progress = ThawProgress()
    readable: set[int] = set()
    cold: dict[int, tuple[str, int, str | None, int]] = {}
    seen: set[int] = set()
    for row in rows:
        seen.add(row.chunk_id)
        if row.is_readable:
            readable.add(row.chunk_id)
        elif row.may_keep:
            cold[row.chunk_id] = (row.state, row.store_id, row.storage_class, row.stored_bytes)
    progress.chunks, progress.readable = len(seen), len(readable)
    for chunk_id, (state, store_id, storage_class, stored_bytes) in cold.items():
        if chunk_id in readable:
            continue
        progress.cold_bytes += stored_bytes
        progress.thawing += state == CopyState.THAWING
        store: object = context.store_of(store_id)
        if storage_class is not None and isinstance(store, ClassedStore):
            place = StorageClass(storage_class)
            progress.terms[place] = store.class_terms[place]
            progress.classes[place] = progress.classes.get(place, 0) + stored_bytes
    return progress


def thaw_view(session: Session, checkpoint: Checkpoint, progress: ThawProgress) -> ThawView:
    project, run = session.execute(
        select(Project.name, Run.name).join(Run, Run.project_id == Project.id).where(Run.id == checkpoint.run_id)
    ).one()
    ends = [each for each in (checkpoint.thawed_until, checkpoint.readable_until) if each is not None]
    return ThawView(
        checkpoint_id=checkpoint.id,
        project=project,
        run=run,
        attempt=checkpoint.attempt_number,
        step=checkpoint.step,
        tier=Tier(checkpoint.tier),
        state=_state(checkpoint),
        requested_at=checkpoint.thaw_requested_at,
        speed=None if checkpoint.thaw_speed is None else ThawSpeed(checkpoint.thaw_speed),
        expected_at=checkpoint.thaw_expected_at,
        readable_until=min(ends) if checkpoint.tier == Tier.HOT and ends else checkpoint.thawed_until,
        chunks=progress.chunks,
        readable_chunks=progress.readable,
        thawing_chunks=progress.thawing,
        cold_bytes=progress.cold_bytes,
        takes_seconds=progress.takes_seconds(),
        costs_dollars=progress.costs_dollars(),
    )


def _state(checkpoint: Checkpoint) -> ThawState:
    if checkpoint.thawed_until is None:
        return ThawState.NOT_NEEDED if checkpoint.tier == Tier.HOT else ThawState.NEEDED
    return ThawState.THAWED if checkpoint.tier == Tier.HOT else ThawState.THAWING


def request_thaw(context: ServiceContext, caller: Principal, checkpoint_id: str, request: RequestThaw) -> ThawView:
    """Repeatable: it prolongs, and never shortens. Raises `checkpoint_not_found`, `checkpoint_conflict`,
    `invalid_request` for a speed that a class does not have, and what refuse_unless_whole raises."""
    with context.database.transaction() as session:
        project, run, _ = checkpoint_by_id(session, caller, checkpoint_id)
        checkpoint = locked_checkpoint(session, checkpoint_id)
        _refuse_unfit(checkpoint)
        progress = thaw_progress(session, context, checkpoint)
        _refuse_speed(progress, request.speed)
        before = {"tier": checkpoint.tier, "thawed_until": _text(checkpoint.thawed_until)}
        _write_down(session, checkpoint, progress, request)
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
        return thaw_view(session, checkpoint, progress)


def show_thaw(context: ServiceContext, caller: Principal, checkpoint_id: str) -> ThawView:
    """Raises `checkpoint_not_found`, and what refuse_unless_whole raises."""
    with context.database.read() as session:
        _, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        refuse_unless_whole(checkpoint)
        return thaw_view(session, checkpoint, thaw_progress(session, context, checkpoint))


def _refuse_unfit(checkpoint: Checkpoint) -> None:
    refuse_unless_whole(checkpoint)
    if checkpoint.state != CheckpointState.COMMITTED:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Step {checkpoint.step} is in the trash. Take it back with `holdfast checkpoints undelete` first.",
        )
    if checkpoint.health == Health.CORRUPT:
        raise ProblemError(
            ProblemCode.CHECKPOINT_CONFLICT,
            f"Step {checkpoint.step} is corrupt: {checkpoint.health_reason} A thaw would cost and not give it back. "
            "Thaw another one.",
        )


def _refuse_speed(progress: ThawProgress, speed: ThawSpeed) -> None:
    takes = progress.takes_seconds()
    if not progress.classes or speed in takes:
        return
    slowest = max(progress.classes, key=list(StorageClass).index)
    raise ProblemError(
        ProblemCode.INVALID_REQUEST,
        f"Nothing in {slowest.value} is thawed at the speed {speed.value}. Take another one: "
        f"{takes_words(progress.terms[slowest])}.",
        speeds=[each.value for each in takes],
    )


def _write_down(session: Session, checkpoint: Checkpoint, progress: ThawProgress, request: RequestThaw) -> None:
    now = database_now(session)
    seconds = progress.takes_seconds().get(request.speed, 0)
    expected_at = now + timedelta(seconds=seconds)
    cold = progress.readable < progress.chunks
    if checkpoint.thawed_until is None or checkpoint.tier == Tier.HOT:
        checkpoint.thaw_requested_at = now
        # A copy back from a folder takes as long as it takes: no store promises a time.
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
