"""One step of making a chunk readable that has only cold copies: ask the store, request, copy back, or wait.

The copy's row says who is at it (`leased_until`), and afterwards when the store is to be asked again. Nothing else is
kept: what a process that died had asked for, the store itself tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, StoreRole
from holdfast_protocol.tiers import ARCHIVED, TERMS, StorageClass, ThawSpeed
from holdfast_service.catalog.cold_place import can_be_read
from holdfast_service.catalog.copies import PROVEN, object_key
from holdfast_service.catalog.copying import (
    CopyTask,
    LeaseOverError,
    SourceBadError,
    StoreFailedError,
    TargetBadError,
    begin_copy,
    copy_now,
)
from holdfast_service.catalog.tables import Checkpoint, Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import ObjectKey, ObjectMissing, StoreError
from holdfast_service.stores.storage_classes import ClassedStore, ClassFacts
from holdfast_service.tiers.movable import classed_store

_LEASE = timedelta(minutes=10)
_DAY = timedelta(days=1)
# A thaw of hours is not asked after every few seconds: each question costs.
_LOOKS_PER_THAW = 20
_SOONEST, _LATEST = timedelta(seconds=60), timedelta(minutes=30)


@dataclass(frozen=True)
class ChunkThaw:
    """What is asked for: readable until then, and how fast. `ready_at`: when it is expected."""

    speed: ThawSpeed
    until: datetime
    ready_at: datetime

    @classmethod
    def of(cls, checkpoint: Checkpoint, until: datetime, now: datetime) -> ChunkThaw:
        speed = ThawSpeed(checkpoint.thaw_speed or ThawSpeed.STANDARD)
        return cls(speed, until, max(now, checkpoint.thaw_expected_at or now))

    def days(self, since: datetime) -> int:
        """Whole days from then on, which is how a bucket counts."""
        return max(1, math.ceil((self.until - since) / _DAY))


@dataclass(frozen=True)
class Outcome:
    readable: bool = False
    error: str | None = None
    away: bool = False


@dataclass(frozen=True)
class _Claim:
    """An archived copy that this process asks after until `leased_until`, the lease's token."""

    copy_id: int
    key: ObjectKey
    storage_class: StorageClass
    store: ClassedStore
    leased_until: datetime
    now: datetime


def thaw_chunk(context: ServiceContext, chunk_id: int, asked: ChunkThaw) -> Outcome:
    """Repeatable: does nothing while somebody else is at it, or before the store is to be asked again."""
    work = context.database.run(lambda session: _claim(session, context, chunk_id))
    if isinstance(work, CopyTask):
        return _copy_back(context, work)
    if work is None:
        return Outcome()
    try:
        values, readable = _ask(work, asked)
    except StoreError as error:
        # Its lease runs out by itself: not again at once.
        return Outcome(error=str(error), away=error.retryable)
    with context.database.transaction() as session:
        session.execute(
            update(Copy).where(Copy.id == work.copy_id, Copy.leased_until == work.leased_until).values(**values)
        )
    return Outcome(readable)


def _claim(session: Session, context: ServiceContext, chunk_id: int) -> CopyTask | _Claim | None:
    chunk = session.scalar(select(Chunk).where(Chunk.id == chunk_id))
    if chunk is None:
        return None
    now = database_now(session)
    copies = session.scalars(
        select(Copy)
        .where(
            Copy.chunk_id == chunk_id,
            Copy.store_id.in_(context.store_ids),
            Copy.state.in_((CopyState.COLD, CopyState.THAWING)),
            Copy.proof.in_(PROVEN),
        )
        .order_by(Copy.id),
        execution_options={"populate_existing": True},
    ).all()
    cold_store = context.attached(StoreRole.COLD)
    if cold_store is not None and any(
        copy.store_id == cold_store.store_id for copy in copies if can_be_read(context, copy)
    ):
        return begin_copy(session, context, chunk_id, context.store_id)
    for copy in copies:
        store = classed_store(context, copy.store_id)
        if copy.storage_class is not None and store is not None:
            leased_until = now + _LEASE
            claimed = session.scalar(
                update(Copy)
                .where(
                    Copy.id == copy.id,
                    Copy.state == copy.state,
                    or_(Copy.leased_until.is_(None), Copy.leased_until <= now),
                )
                .values(leased_until=leased_until)
                .returning(Copy.id),
                execution_options={"synchronize_session": False},
            )
            key = object_key(copy.project_id, chunk.digest, copy)
            storage_class = StorageClass(copy.storage_class)
            return None if claimed is None else _Claim(copy.id, key, storage_class, store, leased_until, now)
    return None


def _copy_back(context: ServiceContext, task: CopyTask) -> Outcome:
    try:
        return Outcome(copy_now(context, task))
    except StoreFailedError as failure:
        return Outcome(error=str(failure), away=True)
    except (SourceBadError, TargetBadError, LeaseOverError) as failure:
        return Outcome(error=str(failure))


def _ask(work: _Claim, asked: ChunkThaw) -> tuple[dict[str, Any], bool]:
    """What is to be written down, and whether it can be read as long as it is wanted."""
    try:
        told = work.store.class_facts(work.key)
        if told.storage_class != work.storage_class:
            # Somebody moved it in the bucket. In an archive it is asked for again, as what it is now; else it is read.
            state = CopyState.COLD if told.storage_class in ARCHIVED else CopyState.SUSPECT
            return {
                "state": state,
                "storage_class": told.storage_class,
                "readable_until": told.readable_until,
                "thaw_requested_at": None,
                "leased_until": None,
            }, False
        if not told.thawing and not _long_enough(told, asked):
            since = work.now if told.readable_until is not None else asked.ready_at
            work.store.restore_object(work.key, asked.days(since), asked.speed)
            told = work.store.class_facts(work.key)
    except ObjectMissing:
        return {"state": CopyState.SUSPECT, "leased_until": None}, False
    if told.readable_until is not None:
        # It stays cold in name: only readers rely on it.
        return {
            "state": CopyState.COLD,
            "readable_until": told.readable_until,
            "thaw_requested_at": None,
            "leased_until": None,
        }, _long_enough(told, asked)
    again = _takes(work, asked) / _LOOKS_PER_THAW
    return {
        "state": CopyState.THAWING,
        "readable_until": None,
        "thaw_requested_at": work.now,
        "leased_until": work.now + min(max(again, _SOONEST), _LATEST),
    }, False


def _long_enough(told: ClassFacts, asked: ChunkThaw) -> bool:
    return told.readable_until is not None and told.readable_until >= asked.until


def _takes(work: _Claim, asked: ChunkThaw) -> timedelta:
    seconds = TERMS[work.storage_class].thaw_seconds
    return timedelta(seconds=seconds.get(asked.speed, seconds[ThawSpeed.BULK]))
