"""Keeps what a person wants readable so, until its end (rows: `thawed_until` of a checkpoint is not null).

What is archived in a bucket is asked for again and again, by HEAD: only the store knows whether a restore is under way,
done or was never asked for. So a process may die between any two steps, and a request may be sent twice. What lies in
the cold store is copied back to the primary one. The checkpoint becomes hot when all its chunks can be read, and cold
again before any URL can outlive what it points at: its time is counted from when a URL that is issued last has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from sqlalchemy import ColumnElement, exists, func, select, text
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointState, CopyState, Tier
from holdfast_service.catalog.copies import is_readable
from holdfast_service.catalog.going_cold import set_tier
from holdfast_service.catalog.resolve import locked_checkpoint
from holdfast_service.catalog.tables import THAWED, Checkpoint, Chunk, Copy, ReadLease
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.tiers.movable import needed_by
from holdfast_service.tiers.retire import CONTROLLER
from holdfast_service.tiers.thaw_chunk import ChunkThaw, Outcome, thaw_chunk

_CHUNKS_AT_ONCE = 64
# Each may hold a stored chunk in memory.
_THREADS = 4
# More than a round's pause: a thaw that has to be prolonged is prolonged in time.
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
        if any(outcome.away for outcome in failures):
            return
    thawed.checkpoints += context.database.run(lambda session: _settle(session, context, checkpoint_id))


def _thaw_all(context: ServiceContext, chunk_ids: Sequence[int], asked: ChunkThaw) -> list[Outcome]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-thaw") as threads:
        return list(threads.map(lambda chunk_id: thaw_chunk(context, chunk_id, asked), chunk_ids))


def _unreadable(
    session: Session, context: ServiceContext, checkpoint_id: str, after: int
) -> tuple[ChunkThaw | None, list[int]]:
    """What is asked for, and the chunks behind `after` that cannot be read for so long as somebody wants to."""
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
    """Until when its chunks must stay readable: for the person who asked, for whoever reads it now, and for the last
    URL that is issued until then."""
    assert checkpoint.thawed_until is not None
    leased = session.scalar(select(func.max(ReadLease.expires_at)).where(ReadLease.checkpoint_id == checkpoint.id))
    ends = [checkpoint.thawed_until, *([leased] if leased is not None else [])]
    return max(ends) + timedelta(seconds=context.settings.ticket_seconds) + MARGIN


def _has_readable(context: ServiceContext, attempt_id: int, until: datetime | None) -> ColumnElement[bool]:
    """Over `chunks`; without a moment, by a copy that needs no thaw."""
    other = aliased(Copy)
    return exists().where(
        other.chunk_id == Chunk.id, is_readable(context.store_ids, attempt_id, until=until, copy=other)
    )


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
        if checkpoint.tier == Tier.HOT:  # nobody prolonged it in time
            set_tier(session, checkpoint, Tier.THAWING, actor=CONTROLLER, action="checkpoint.cool")
        return False
    ends_at = _first_end(session, context, checkpoint)
    readable_until = None if ends_at is None else ends_at - ticket
    if checkpoint.tier == Tier.HOT:
        checkpoint.readable_until = readable_until
        return False
    # Its days count from now: nobody could read it before.
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
    """Whether its time is over, and nobody reads it: under the lock that a reader's lease is taken under (rule 21)."""
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
