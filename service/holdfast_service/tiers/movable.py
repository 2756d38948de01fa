"""Of which chunks a hotter copy may go: a chunk is as hot as its hottest user (rules present-is-referenced, read-lease
and holds-outrank).

Asked twice: to find work, and again under the locks of the chunk and of all its users.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, exists, func, or_
from sqlalchemy.orm import InstrumentedAttribute, aliased

from holdfast_protocol.states import CheckpointState, CopyState, StoreRole
from holdfast_protocol.tiers import COLD_STORE, StorageClass, coldness, must_be_thawed
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT, PROVEN, is_readable
from holdfast_service.db.lease import has_run_out
from holdfast_service.db.tables.core import (
    Attempt,
    Checkpoint,
    Chunk,
    ChunkListEntry,
    Copy,
    ReadLease,
    Shard,
    ShardChunk,
)
from holdfast_service.db.tables.operations import CheckpointCopy
from holdfast_service.holds.held import store_lets_go
from holdfast_service.stores.base import ClassedStore


@dataclass(frozen=True)
class Place:
    """Where chunks move to: a storage class of the primary store, or the cold store."""

    target: str
    store_id: int
    storage_class: StorageClass | None

    @property
    def is_cold(self) -> bool:
        """What is there cannot be read before a thaw."""
        return must_be_thawed(self.target)

    def holds(self, copy: type[Copy]) -> ColumnElement[bool]:
        """Over copies: it is settled in this place, and proven."""
        return and_(
            copy.store_id == self.store_id,
            copy.storage_class.is_(None) if self.storage_class is None else copy.storage_class == self.storage_class,
            copy.state.in_(KEPT),
            copy.proof.in_(PROVEN),
        )


def place_of(context: ServiceContext, target: str) -> Place | None:
    """None if the cold store is not attached (any more)."""
    if target != COLD_STORE:
        return Place(target, context.store_id, StorageClass(target))
    cold = context.attached(StoreRole.COLD)
    return None if cold is None else Place(target, cold.store_id, None)


def classed_store(context: ServiceContext, store_id: int) -> ClassedStore | None:
    """The store of a catalog row, if it is attached and has storage classes."""
    store: object = context.store_of(store_id)
    return store if isinstance(store, ClassedStore) else None


def hotter_copy(context: ServiceContext, place: Place) -> ColumnElement[bool]:
    """Over `copies`: in the primary store, hotter than the place, good for every attempt, and free of a lease."""
    colder = [each.value for each in StorageClass if coldness(each) >= coldness(place.target)]
    return and_(
        Copy.store_id == context.store_id,
        Copy.state == CopyState.VERIFIED,
        Copy.proof.in_(PROVEN),
        or_(Copy.storage_class.is_(None), Copy.storage_class.not_in(colder)),
    )


def may_be_left(place: Place, now: datetime, there: Collection[int]) -> ColumnElement[bool]:
    """Over `copies` that are hotter: the place has the chunk by one of the copies `there`, the store was told of no
    hold on this copy, and no process reads it back. Never the last good copy."""
    other = aliased(Copy)
    return and_(
        exists().where(other.chunk_id == Copy.chunk_id, other.id.in_(there), other.id != Copy.id, place.holds(other)),
        not_kept_back(now),
    )


def not_kept_back(now: datetime) -> ColumnElement[bool]:
    """Over `copies`: no hold and no process's work keeps it."""
    return and_(
        store_lets_go(),
        has_run_out(Copy.leased_until, now),
    )


def wanted_hotter(place: Place) -> ColumnElement[bool]:
    """Over `chunks`: a committed checkpoint that belongs somewhere hotter needs it."""
    at_least = [each for each in (*StorageClass, COLD_STORE) if coldness(each) >= coldness(place.target)]
    return _used_by(
        Checkpoint.state == CheckpointState.COMMITTED,
        or_(Checkpoint.tier_wanted.is_(None), Checkpoint.tier_wanted.not_in(at_least)),
    )


def in_use(context: ServiceContext, place: Place, now: datetime) -> ColumnElement[bool]:
    """Over `chunks`: for the time being it must stay where it is. An upload relies on it; and, if it would have to
    be thawed afterwards, a reader uses a checkpoint that needs it, an attempt was told to resume from one, a person
    wants one to be readable, or another store has not got its copy of one yet."""
    negotiated = exists().where(
        ShardChunk.chunk_id == Chunk.id,
        Shard.id == ShardChunk.shard_id,
        Checkpoint.id == Shard.checkpoint_id,
        Checkpoint.state == CheckpointState.UPLOADING,
    )
    uses = [negotiated, _used_by(Checkpoint.state == CheckpointState.UPLOADING)]
    if place.is_cold:
        reading = exists().where(ReadLease.checkpoint_id == Checkpoint.id, ReadLease.expires_at > now)
        uses.append(_used_by(reading))
        resuming = exists().where(
            Attempt.run_id == Checkpoint.run_id,
            Attempt.ended_at.is_(None),
            func.coalesce(Attempt.resumed_from_id, Attempt.offered_id) == Checkpoint.id,
        )
        uses.append(_used_by(Checkpoint.state == CheckpointState.COMMITTED, resuming))
        uses.append(_used_by(Checkpoint.state == CheckpointState.COMMITTED, Checkpoint.thawed_until.is_not(None)))
        waiting = exists().where(
            CheckpointCopy.checkpoint_id == Checkpoint.id,
            CheckpointCopy.store_id.in_(context.store_ids),
            CheckpointCopy.wanted,
            CheckpointCopy.complete_at.is_(None),
        )
        uses.append(_used_by(Checkpoint.state == CheckpointState.COMMITTED, waiting))
    return or_(*uses)


def _used_by(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    return exists().where(
        ChunkListEntry.chunk_id == Chunk.id,
        Shard.chunk_list_id == ChunkListEntry.chunk_list_id,
        Checkpoint.id == Shard.checkpoint_id,
        *conditions,
    )


def needed_by(checkpoint_id: str) -> ColumnElement[bool]:
    """Over `chunks`."""
    return _used_by(Checkpoint.id == checkpoint_id)


def is_out_of_the_cold(
    context: ServiceContext, attempt_id: int | InstrumentedAttribute[int], *, until: datetime | None, copy: type[Copy]
) -> ColumnElement[bool]:
    """Over `copies`: as `is_readable`, for a thaw. What is suspect in the cold store does not count: once it was read
    it is as cold as before."""
    readable = is_readable(context.store_ids, attempt_id, until=until, copy=copy)
    cold_store = context.attached(StoreRole.COLD)
    if cold_store is None:
        return readable
    return and_(readable, or_(copy.store_id != cold_store.store_id, copy.state != CopyState.SUSPECT))
