"""What a run or a checkpoint takes in the stores, counted from its rows.

logical        what the states of the committed checkpoints are, as the trainer sees them
stored         what the copies of their chunks take in the stores
deduplicated   what these checkpoints did not send, because it was there
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import CTE, ColumnElement, and_, case, func, literal, select, union_all
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, CopyState, Tier
from holdfast_protocol.stores import StoreSweep
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Shard, ShardChunk
from holdfast_service.db.tables.operations import Hold, StoreMaintenance
from holdfast_service.holds.held import in_force, pin_in_force


def stored_bytes_of_run(session: Session, run_id: str) -> int:
    """The bytes of all copies, in all stores, of the chunks that its committed checkpoints need. What runs share counts
    in each of them. It reads every chunk of the run: callers ask for one run at a time."""
    lists = (
        select(Shard.chunk_list_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.COMMITTED)
    )
    chunks = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    total = session.scalar(
        select(func.sum(Copy.stored_bytes)).where(Copy.chunk_id.in_(chunks), Copy.state != CopyState.GONE)
    )
    return int(total or 0)


def stored_bytes_of_checkpoint(session: Session, checkpoint_id: str) -> int:
    """The bytes of the distinct chunks that it needs, each in its smallest whole copy: less than the chunks' own bytes
    if they are compressed. It reads every chunk: callers ask for one checkpoint at a time."""
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
    chunks = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    smallest = (
        select(func.min(Copy.stored_bytes).label("stored"))
        .where(Copy.chunk_id.in_(chunks), Copy.state.in_((*KEPT, CopyState.SUSPECT)))
        .group_by(Copy.chunk_id)
        .subquery()
    )
    return int(session.scalar(select(func.sum(smallest.c.stored))) or 0)


def sweeps_of(session: Session, context: ServiceContext) -> list[StoreSweep]:
    """What the last sweep of each attached store found. What was found in a store that is not attached any more is not
    swept again, and would be told for ever."""
    swept = select(StoreMaintenance.sweep).where(
        StoreMaintenance.store_id.in_(context.store_ids), StoreMaintenance.sweep.is_not(None)
    )
    return [StoreSweep.model_validate(sweep) for sweep in session.scalars(swept)]


_IN_TRASH = (CheckpointState.TRASHED, CheckpointState.DELETING)
_NEEDING = (CheckpointState.UPLOADING, CheckpointState.COMMITTED, *_IN_TRASH)


class KeptFor(StrEnum):
    COMMITTED = "committed"
    ARRIVING = "arriving"
    TRASHED = "trashed"
    PENDING_COLLECTION = "pending_collection"


@dataclass(frozen=True)
class CountedBytes:
    """The stored bytes of one project in one store and storage class, of the copies that are kept for the same."""

    project_id: str
    store_id: int
    storage_class: str | None
    tier: Tier
    kept_for: KeptFor
    copies: int
    bytes: int
    pinned_bytes: int
    held_bytes: int


def count_bytes(session: Session, run_id: str) -> list[CountedBytes]:
    """Of the chunks that this run's checkpoints use, even if other runs use them too. Every copy is counted once, by
    what keeps it:

    committed            a committed checkpoint needs its chunk
    arriving             it is being uploaded or copied, or only an upload under way relies on it
    trashed              only checkpoints in the trash need it: what purging them would free
    pending collection   it is marked: what the collector will free

    These four add up to everything that may be in the stores. `pinned` and `held` are parts of `committed` and
    `trashed`, and overlap each other. It reads every reference of the run. What a whole project has is not counted but
    kept: `tallies/sums.py`.
    """
    users = _users(database_now(session), run_id)
    kept_for = _kept_for(users)
    tier = case(
        (Copy.state == CopyState.COLD, Tier.COLD.value),
        (Copy.state == CopyState.THAWING, Tier.THAWING.value),
        else_=Tier.HOT.value,
    )
    # Pinned and held is what a checkpoint needs that is there: bytes that still arrive are neither.
    needed = kept_for.in_((KeptFor.COMMITTED, KeptFor.TRASHED))
    query = (
        select(
            Copy.project_id,
            Copy.store_id,
            Copy.storage_class,
            tier,
            kept_for,
            func.count(),
            func.sum(Copy.stored_bytes),
            func.sum(case((and_(needed, users.c.pinned == 1), Copy.stored_bytes), else_=0)),
            func.sum(case((and_(needed, users.c.held == 1), Copy.stored_bytes), else_=0)),
        )
        .join(users, users.c.chunk_id == Copy.chunk_id)
        .where(Copy.state != CopyState.GONE)
        .group_by(Copy.project_id, Copy.store_id, Copy.storage_class, tier, kept_for)
    )
    return list(_counted(session, query))


def _counted(session: Session, query: object) -> Iterator[CountedBytes]:
    for project, store, storage_class, tier, kept_for, copies, total, pinned, held in session.execute(query):  # type: ignore[call-overload]
        yield CountedBytes(
            project, store, storage_class, Tier(tier), KeptFor(kept_for), copies, int(total), int(pinned), int(held)
        )


def _kept_for(users: CTE) -> ColumnElement[str]:
    return case(
        (Copy.state == CopyState.DELETING, KeptFor.PENDING_COLLECTION.value),
        (Copy.state.in_((CopyState.PENDING, CopyState.COPYING)), KeptFor.ARRIVING.value),
        (users.c.committed == 1, KeptFor.COMMITTED.value),
        (users.c.uploading == 1, KeptFor.ARRIVING.value),
        (users.c.trashed == 1, KeptFor.TRASHED.value),
        else_=KeptFor.PENDING_COLLECTION.value,
    )


def _users(now: datetime, run_id: str) -> CTE:
    """By chunk, which kinds of checkpoints use it. Lists first: many shards of a long run have the same one."""
    held = select(Hold.checkpoint_id).where(in_force(now))
    lists = (
        select(
            Shard.chunk_list_id,
            _any(Checkpoint.state == CheckpointState.COMMITTED).label("committed"),
            _any(Checkpoint.state == CheckpointState.UPLOADING).label("uploading"),
            _any(Checkpoint.state.in_(_IN_TRASH)).label("trashed"),
            _any(pin_in_force(now)).label("pinned"),
            _any(Checkpoint.id.in_(held)).label("held"),
        )
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(
            Shard.chunk_list_id.is_not(None),
            Checkpoint.state.in_(_NEEDING),
            Checkpoint.run_id == run_id,
        )
        .group_by(Shard.chunk_list_id)
        .subquery()
    )
    flags = ("committed", "uploading", "trashed", "pinned", "held")
    sealed = select(ChunkListEntry.chunk_id, *(lists.c[flag] for flag in flags)).join(
        lists, lists.c.chunk_list_id == ChunkListEntry.chunk_list_id
    )
    negotiated = (
        select(ShardChunk.chunk_id, *(literal(int(flag == "uploading")).label(flag) for flag in flags))
        .join(Shard, Shard.id == ShardChunk.shard_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(Checkpoint.state == CheckpointState.UPLOADING, Checkpoint.run_id == run_id)
    )
    uses = union_all(sealed, negotiated).subquery()
    grouped = select(uses.c.chunk_id, *(func.max(uses.c[flag]).label(flag) for flag in flags)).group_by(uses.c.chunk_id)
    # Else Postgres lets each of its workers count all references for itself, to join its part of the copies.
    return grouped.cte("users").prefix_with("MATERIALIZED", dialect="postgresql")


def _any(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.max(case((condition, 1), else_=0))
