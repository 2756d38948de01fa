"""Keeps the chunks that a person wants readable so, until the end of that time (rows: `thawed_until` of a checkpoint is
not null).

The controller asks for what is archived in a bucket again and again, by HEAD: only the store knows whether a restore is
under way, done or was never asked for. A process may therefore die between any two steps, and a request may be sent
twice. What lies in the cold store is copied back to the primary one. The checkpoint becomes hot when all its chunks can
be read, and cold again before any URL can outlive what it points at: its time counts from the end of the URL that is
issued last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, exists, func, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointState, CopyState, StoreRole, Tier
from holdfast_protocol.tiers import ARCHIVED, StorageClass, ThawSpeed
from holdfast_service.context import ServiceContext
from holdfast_service.copies.copy_chunk import (
    CopyTask,
    LeaseOverError,
    SourceBadError,
    StoreFailedError,
    TargetBadError,
    begin_copy,
    copy_now,
)
from holdfast_service.copies.corruption import set_tier
from holdfast_service.copies.predicates import PROVEN, can_be_read, object_key
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import THAWED, Checkpoint, Chunk, Copy, ReadLease
from holdfast_service.runs.views import locked_checkpoint
from holdfast_service.stores.base import ClassedStore, ClassFacts, ObjectKey, ObjectMissing, StoreError
from holdfast_service.tiers.cool import CONTROLLER
from holdfast_service.tiers.movable import classed_store, is_out_of_the_cold, needed_by

_LEASE_SECONDS = 600
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
    unavailable: bool = False


@dataclass(frozen=True)
class _Claim:
    """An archived copy that this process asks after under a lease."""

    copy_id: int
    key: ObjectKey
    storage_class: StorageClass
    store: ClassedStore
    lease_token: str
    now: datetime


def thaw_chunk(context: ServiceContext, chunk_id: int, asked: ChunkThaw) -> Outcome:
    """One step of making a chunk readable that has only cold copies: ask the store, request, copy back, or wait.
    Repeatable: does nothing while another process works on it, or before the store is to be asked again.

    The copy's row names the process that works on it, and afterwards (`leased_until`) when the store is to be asked
    again. Nothing else is kept: the store itself tells what a dead process had asked for.
    """
    work = context.database.run(lambda session: _claim(session, context, chunk_id))
    if isinstance(work, CopyTask):
        return _copy_back(context, work)
    if work is None:
        return Outcome()
    try:
        values, readable = _ask(work, asked)
    except StoreError as error:
        # Its lease runs out by itself: not again at once.
        return Outcome(error=str(error), unavailable=error.retryable)
    with context.database.transaction() as session:
        lease.give_back(session, Copy, work.lease_token, Copy.id == work.copy_id, **values)
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
            same = (Copy.id == copy.id, Copy.state == copy.state)
            token = lease.claim(session, Copy, *same, seconds=_LEASE_SECONDS)
            key = object_key(copy.project_id, chunk.digest, copy)
            storage_class = StorageClass(copy.storage_class)
            return None if token is None else _Claim(copy.id, key, storage_class, store, token, now)
    return None


def _copy_back(context: ServiceContext, task: CopyTask) -> Outcome:
    try:
        return Outcome(copy_now(context, task))
    except StoreFailedError as failure:
        return Outcome(error=str(failure), unavailable=True)
    except (SourceBadError, TargetBadError, LeaseOverError) as failure:
        return Outcome(error=str(failure))


def _ask(work: _Claim, asked: ChunkThaw) -> tuple[dict[str, Any], bool]:
    """What is to be written down as the lease ends, and whether it can be read as long as it is wanted."""
    try:
        told = work.store.class_facts(work.key)
        if told.storage_class != work.storage_class:
            # A person or a lifecycle rule moved it. In an archive it is asked for again, as what it is now; else read.
            state = CopyState.COLD if told.storage_class in ARCHIVED else CopyState.SUSPECT
            return {
                "state": state,
                "storage_class": told.storage_class,
                "readable_until": told.readable_until,
                "thaw_requested_at": None,
            }, False
        if not told.thawing and not _long_enough(told, asked):
            since = work.now if told.readable_until is not None else asked.ready_at
            work.store.restore_object(work.key, asked.days(since), asked.speed)
            told = work.store.class_facts(work.key)
    except ObjectMissing:
        return {"state": CopyState.SUSPECT}, False
    if told.readable_until is not None:
        # It stays cold in name: only readers rely on it.
        return {
            "state": CopyState.COLD,
            "readable_until": told.readable_until,
            "thaw_requested_at": None,
        }, _long_enough(told, asked)
    again = _takes(work, asked) / _LOOKS_PER_THAW
    return {
        "state": CopyState.THAWING,
        "readable_until": None,
        "thaw_requested_at": work.now,
        "until": work.now + min(max(again, _SOONEST), _LATEST),
    }, False


def _long_enough(told: ClassFacts, asked: ChunkThaw) -> bool:
    return told.readable_until is not None and told.readable_until >= asked.until


def _takes(work: _Claim, asked: ChunkThaw) -> timedelta:
    seconds = work.store.class_terms[work.storage_class].thaw_seconds
    return timedelta(seconds=seconds.get(asked.speed, max(seconds.values())))


_CHUNKS_AT_ONCE = 64
# Each may hold a stored chunk in memory.
_THREADS = 4
# More than a pass's pause: a thaw that must be prolonged is prolonged in time.
MARGIN = timedelta(hours=1)

_log = structlog.get_logger("holdfast.tiers")


@dataclass
class Thawed:
    """`chunks` that became readable, `checkpoints` that became hot, or cold again."""

    chunks: int = 0
    checkpoints: int = 0
    ended: int = 0
    failed: int = 0
    error: str | None = None


def thawing_checkpoints(session: Session) -> list[str]:
    return list(session.scalars(select(Checkpoint.id).where(text(THAWED)).order_by(Checkpoint.id)))


def advance_thaw(context: ServiceContext, checkpoint_id: str, thawed: Thawed) -> None:
    """One step for each chunk that needs one. Repeatable, by any number of processes."""
    if context.database.run(lambda session: _end_if_over(session, context, checkpoint_id)):
        thawed.ended += 1
        return
    after = 0
    while not context.stopping.is_set():
        with context.database.read() as session:
            asked, chunk_ids = _unreadable(session, context, checkpoint_id, after)
        if asked is None or not chunk_ids:
            break
        after = chunk_ids[-1]
        outcomes = _thaw_all(context, chunk_ids, asked)
        thawed.chunks += sum(outcome.readable for outcome in outcomes)
        failures = [outcome for outcome in outcomes if outcome.error is not None]
        if failures:
            thawed.failed, thawed.error = thawed.failed + len(failures), failures[-1].error
            _log.warning("thaw_failed", checkpoint_id=checkpoint_id, reason=thawed.error)
        if any(outcome.unavailable for outcome in failures):
            return
    thawed.checkpoints += context.database.run(lambda session: _settle(session, context, checkpoint_id))


def _thaw_all(context: ServiceContext, chunk_ids: Sequence[int], asked: ChunkThaw) -> list[Outcome]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-thaw") as threads:
        return list(threads.map(lambda chunk_id: thaw_chunk(context, chunk_id, asked), chunk_ids))


def _unreadable(
    session: Session, context: ServiceContext, checkpoint_id: str, after: int
) -> tuple[ChunkThaw | None, list[int]]:
    """What is asked for, and the chunks behind `after` that cannot be read until the wanted end."""
    checkpoint = session.get_one(Checkpoint, checkpoint_id, populate_existing=True)
    if checkpoint.thawed_until is None:
        return None, []
    now = database_now(session)
    until = wanted_until(session, context, checkpoint)
    statement = (
        select(Chunk.id)
        .where(Chunk.id > after, needed_by(checkpoint_id), ~_has_readable(context, checkpoint.attempt_id, until))
        .order_by(Chunk.id)
        .limit(_CHUNKS_AT_ONCE)
    )
    return ChunkThaw.of(checkpoint, until, now), list(session.scalars(statement))


def wanted_until(session: Session, context: ServiceContext, checkpoint: Checkpoint) -> datetime:
    """Until when its chunks must stay readable: for the person who asked, for its readers now, and for the last
    URL that is issued until then."""
    assert checkpoint.thawed_until is not None
    leased = session.scalar(select(func.max(ReadLease.expires_at)).where(ReadLease.checkpoint_id == checkpoint.id))
    ends = [checkpoint.thawed_until, *([leased] if leased is not None else [])]
    return max(ends) + timedelta(seconds=context.settings.ticket_seconds) + MARGIN


def _has_readable(context: ServiceContext, attempt_id: int, until: datetime | None) -> ColumnElement[bool]:
    """Over `chunks`; without a moment, by a copy that needs no thaw."""
    other = aliased(Copy)
    return exists().where(other.chunk_id == Chunk.id, is_out_of_the_cold(context, attempt_id, until=until, copy=other))


def _lacks(session: Session, context: ServiceContext, checkpoint: Checkpoint, until: datetime | None) -> bool:
    """Whether one of its chunks cannot be read until then."""
    statement = select(Chunk.id).where(needed_by(checkpoint.id), ~_has_readable(context, checkpoint.attempt_id, until))
    return session.scalar(statement.limit(1)) is not None


def _settle(session: Session, context: ServiceContext, checkpoint_id: str) -> bool:
    """Whether it became hot: all its chunks can be read now, and for as long as a URL lives."""
    checkpoint = _locked(session, checkpoint_id)
    if checkpoint.thawed_until is None or checkpoint.state != CheckpointState.COMMITTED:
        return False
    now = database_now(session)
    ticket = timedelta(seconds=context.settings.ticket_seconds)
    if _lacks(session, context, checkpoint, now + ticket):
        if checkpoint.tier == Tier.HOT:  # no person prolonged it in time
            set_tier(session, checkpoint, Tier.THAWING, actor=CONTROLLER, action="checkpoint.cool")
        return False
    ends_at = _first_end(session, context, checkpoint)
    readable_until = None if ends_at is None else ends_at - ticket
    if checkpoint.tier == Tier.HOT:
        checkpoint.readable_until = readable_until
        return False
    # Its days count from now: no reader could use it before.
    checkpoint.thawed_until = max(checkpoint.thawed_until, now + timedelta(days=checkpoint.thaw_days or 1))
    checkpoint.readable_until = readable_until
    set_tier(session, checkpoint, Tier.HOT, actor=CONTROLLER, action="checkpoint.thawed")
    return True


def _first_end(session: Session, context: ServiceContext, checkpoint: Checkpoint) -> datetime | None:
    """When the first of its chunks cannot be read any more; None if no chunk depends on a thaw."""
    thawed = (
        select(func.max(Copy.readable_until).label("until"))
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(
            needed_by(checkpoint.id),
            ~_has_readable(context, checkpoint.attempt_id, None),
            Copy.state == CopyState.COLD,
            Copy.store_id.in_(context.store_ids),
        )
        .group_by(Copy.chunk_id)
        .subquery()
    )
    first: datetime | None = session.scalar(select(func.min(thawed.c.until)))
    return first


def _end_if_over(session: Session, context: ServiceContext, checkpoint_id: str) -> bool:
    """Whether its time is over and no reader has it open: under the lock that a reader's lease is taken under (rule
    read-lease)."""
    checkpoint = _locked(session, checkpoint_id)
    if checkpoint.thawed_until is None:
        return True
    now = database_now(session)
    if checkpoint.state == CheckpointState.COMMITTED:
        reading = session.scalar(
            select(exists().where(ReadLease.checkpoint_id == checkpoint_id, ReadLease.expires_at > now))
        )
        if checkpoint.thawed_until > now or reading:
            return False
    checkpoint.thaw_requested_at = checkpoint.thaw_expected_at = checkpoint.thawed_until = None
    checkpoint.thaw_speed = checkpoint.thaw_days = None
    checkpoint.readable_until = None
    checkpoint.tier_checked_at = None
    tier = Tier.COLD if _lacks(session, context, checkpoint, None) else Tier.HOT
    set_tier(session, checkpoint, tier, actor=CONTROLLER, action="checkpoint.thaw_end", always=True)
    return True


def _locked(session: Session, checkpoint_id: str) -> Checkpoint:
    return locked_checkpoint(session, checkpoint_id)
