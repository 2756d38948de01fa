"""How a checkpoint can be read now, and what a thaw would take: looked up in its chunks' copies, not remembered."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, Tier
from holdfast_protocol.tiers import TERMS, StorageClass, ThawSpeed, ThawState, ThawView
from holdfast_service.catalog.copies import KEPT, PROVEN
from holdfast_service.catalog.tables import Checkpoint, ChunkListEntry, Copy, Project, Run, Shard
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext

_GIB = 1024**3


@dataclass
class Standing:
    """Of a checkpoint's distinct chunks. `classes`: by the archive class of what cannot be read, its stored bytes."""

    chunks: int = 0
    readable: int = 0
    thawing: int = 0
    cold_bytes: int = 0
    classes: dict[StorageClass, int] = field(default_factory=dict)

    def takes_seconds(self) -> dict[ThawSpeed, int]:
        """By speed that every class has; the slowest counts."""
        speeds = [set(TERMS[each].thaw_seconds) for each in self.classes]
        common = set(ThawSpeed).intersection(*speeds) if speeds else set()
        return {
            speed: max(TERMS[each].thaw_seconds[speed] for each in self.classes)
            for speed in ThawSpeed
            if speed in common
        }

    def costs_dollars(self) -> dict[ThawSpeed, float]:
        return {
            speed: round(
                sum(TERMS[each].retrieval_dollars[speed] * size / _GIB for each, size in self.classes.items()), 4
            )
            for speed in self.takes_seconds()
        }


def standing_of(session: Session, context: ServiceContext, checkpoint: Checkpoint) -> Standing:
    """It looks at every chunk, so it is asked for one checkpoint at a time."""
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint.id)
    needed = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists)).distinct().subquery()
    rows = session.execute(
        select(
            needed.c.chunk_id,
            Copy.state,
            Copy.storage_class,
            Copy.stored_bytes,
            Copy.readable_until,
            Copy.proof,
            Copy.attempt_id,
        )
        .outerjoin(Copy, (Copy.chunk_id == needed.c.chunk_id) & Copy.store_id.in_(context.store_ids))
        .order_by(needed.c.chunk_id)
    )
    until = database_now(session) + timedelta(seconds=context.settings.ticket_seconds)
    standing = Standing()
    readable: set[int] = set()
    cold: dict[int, tuple[str, str | None, int]] = {}
    seen: set[int] = set()
    for row in rows:
        seen.add(row.chunk_id)
        if row.proof not in PROVEN and row.attempt_id != checkpoint.attempt_id:
            continue
        thawed = row.state == CopyState.COLD and row.readable_until is not None and row.readable_until >= until
        if row.state in {CopyState.VERIFIED, CopyState.SUSPECT} or thawed:
            readable.add(row.chunk_id)
        elif row.state in KEPT:
            cold[row.chunk_id] = (row.state, row.storage_class, row.stored_bytes)
    standing.chunks, standing.readable = len(seen), len(readable)
    for chunk_id, (state, storage_class, stored_bytes) in cold.items():
        if chunk_id in readable:
            continue
        standing.cold_bytes += stored_bytes
        standing.thawing += state == CopyState.THAWING
        if storage_class is not None:
            place = StorageClass(storage_class)
            standing.classes[place] = standing.classes.get(place, 0) + stored_bytes
    return standing


def thaw_view(session: Session, checkpoint: Checkpoint, standing: Standing) -> ThawView:
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
        chunks=standing.chunks,
        readable_chunks=standing.readable,
        thawing_chunks=standing.thawing,
        cold_bytes=standing.cold_bytes,
        takes_seconds=standing.takes_seconds(),
        costs_dollars=standing.costs_dollars(),
    )


def _state(checkpoint: Checkpoint) -> ThawState:
    if checkpoint.thawed_until is None:
        return ThawState.NOT_NEEDED if checkpoint.tier == Tier.HOT else ThawState.NEEDED
    return ThawState.THAWED if checkpoint.tier == Tier.HOT else ThawState.THAWING
