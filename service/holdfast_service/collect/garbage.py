"""Which copies may go, and from which stores (rules mark-before-delete, late-put-window, row-before-copy and
holds-outrank). Asked twice: to find candidates, and again under the chunk's lock.

A copy may go when no PUT into it can land any more, no upload relies on it, no process works on its chunk, the store
was told of no hold on it, and either nothing needs its chunk or another copy in the same store serves every attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, exists, or_
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.attached_stores.ownership import ForeignStoreError, deletes_are_allowed
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT, PROVEN, counts_as_read
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Shard, ShardChunk
from holdfast_service.errors import WentBackError
from holdfast_service.holds.held import is_held, store_lets_go
from holdfast_service.records.history import settle_history
from holdfast_service.records.writing import remove_due_records
from holdfast_service.stores.base import StoreError, StoreNotOurs

# A checkpoint in the trash can come back, and its chunks stay; and until a purge has removed the checkpoint's record
# from every store, a catalog that is rebuilt from one of them would promise the chunks again (rule record-outbox).
LIVE = (CheckpointState.UPLOADING, CheckpointState.COMMITTED, CheckpointState.TRASHED, CheckpointState.DELETING)
# Still to be written: good only for its own writer.
UNWRITTEN = (CopyState.PENDING, CopyState.COPYING)
THERE = (*UNWRITTEN, CopyState.VERIFIED, CopyState.COLD, CopyState.THAWING, CopyState.SUSPECT, CopyState.BAD)


@dataclass(frozen=True)
class Question:
    """What is asked at one moment of the database's clock, of these stores."""

    session: Session
    store_ids: Collection[int]
    now: datetime
    longest_upload: timedelta

    @classmethod
    def now_of(cls, session: Session, context: ServiceContext, store_ids: Collection[int]) -> Question:
        seconds = context.settings.longest_upload_seconds
        return cls(session, store_ids, database_now(session), timedelta(seconds=seconds))

    def may_go(self) -> ColumnElement[bool]:
        """Over `copies`."""
        return and_(
            Copy.store_id.in_(self.store_ids),
            Copy.state.in_(THERE),
            self.waited_out(),
            ~self.worked_on(),
            store_lets_go(),
            ~relied_on_by_an_upload(),
            or_(Copy.state.in_(UNWRITTEN), ~self.chunk_is_needed(), another_serves_everybody()),
        )

    def waited_out(self) -> ColumnElement[bool]:
        """A late PUT lands after an abort, so a copy waits out its last ticket and the longest upload."""
        return Copy.ticket_expires_at < self.now - self.longest_upload

    def worked_on(self) -> ColumnElement[bool]:
        """A lease is in force on this copy or on another of its chunk: it is read again, or one is made from another.
        The collector's own leases count for nothing."""
        leased = aliased(Copy)
        return exists().where(
            leased.chunk_id == Copy.chunk_id, leased.leased_until > self.now, leased.state != CopyState.DELETING
        )

    def chunk_is_needed(self, chunk_id: InstrumentedAttribute[int] = Copy.chunk_id) -> ColumnElement[bool]:
        """By a checkpoint that is there or may come back. A hold is a promise of its own: what is held keeps its chunks
        whatever state another part gave it."""
        return exists().where(
            ChunkListEntry.chunk_id == chunk_id,
            ChunkListEntry.chunk_list_id == Shard.chunk_list_id,
            Shard.checkpoint_id == Checkpoint.id,
            or_(Checkpoint.state.in_(LIVE), is_held(self.session)),
        )


def relied_on_by_an_upload() -> ColumnElement[bool]:
    """Over `copies`."""
    return exists().where(
        ShardChunk.copy_id == Copy.id,
        ShardChunk.shard_id == Shard.id,
        Shard.checkpoint_id == Checkpoint.id,
        Checkpoint.state == CheckpointState.UPLOADING,
    )


def another_serves_everybody() -> ColumnElement[bool]:
    """Over `copies`. The oldest verified copy that is proven stays; an unproven one goes only beside it. A suspect one
    is read first; and a bad one is the sign that its chunk must be seen whole before a client relies on it, hence it
    goes only beside a copy that was read since. That one may be cold: if the bad one could be read at once, so could
    what has repaired it, until a policy moved that."""
    other = aliased(Copy)
    at_once = and_(other.state == CopyState.VERIFIED, other.readable_until.is_(None))  # thawed: cold again afterwards
    beside_a_repaired_one = and_(Copy.state == CopyState.BAD, Copy.repaired_at.is_not(None), other.state.in_(KEPT))
    return and_(
        Copy.state.in_((CopyState.VERIFIED, CopyState.BAD)),
        exists().where(
            other.chunk_id == Copy.chunk_id,
            other.store_id == Copy.store_id,
            other.id != Copy.id,
            or_(at_once, beside_a_repaired_one),
            other.proof.in_(PROVEN),
            or_(Copy.state == CopyState.VERIFIED, Copy.bad_at.is_(None), _read_since(other)),
            or_(Copy.state != CopyState.VERIFIED, Copy.proof.not_in(PROVEN), other.id < Copy.id),
            # Copies in two storage classes both stay: the controller `tiers` takes the hotter one away.
            or_(Copy.state != CopyState.VERIFIED, other.storage_class.is_not_distinct_from(Copy.storage_class)),
        ),
    )


def _read_since(other: type[Copy]) -> ColumnElement[bool]:
    """And repairing has said so (`repaired_at`, with an event), which it could not once the bad one is gone."""
    return and_(Copy.repaired_at.is_not(None), counts_as_read(other), other.read_after >= Copy.damage)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ready:
    """`skipped`: a sentence for each store that is left alone."""

    stores: tuple[AttachedStore, ...]
    skipped: tuple[str, ...]

    @property
    def store_ids(self) -> set[int]:
        return {attached.store_id for attached in self.stores}


def ready_stores(context: ServiceContext) -> Ready:
    """From which stores anything may be deleted now: those that say, when they are asked, that they are this catalog's
    in this epoch (rule fencing-token). An unavailable or foreign one blocks only itself."""
    stores, skipped = [], []
    for attached in context.stores:
        why = why_not(context, attached) or _why_older(attached)
        if why is None:
            stores.append(attached)
        else:
            skipped.append(f"Nothing is deleted from the {attached.role.value} store: {why}")
            _log.warning("nothing is deleted from the %s store: %s", attached.role.value, why)
    return Ready(tuple(stores), tuple(skipped))


def why_not(context: ServiceContext, attached: AttachedStore) -> str | None:
    """Why nothing may be deleted from it now; None if it may."""
    try:
        settle_history(context)
        allowed = deletes_are_allowed(
            attached.store, attached.store_id, context.catalog_id, context.epoch, context.claim
        )
        if allowed:
            remove_due_records(
                context, attached
            )  # before any chunk (rule record-outbox); it may have been unavailable until now
    except WentBackError as error:
        return error.detail
    except (ForeignStoreError, StoreNotOurs) as error:
        return str(error)
    except StoreError as error:
        return f"it does not answer ({error})."
    if allowed:
        return None
    return "it does not say that it belongs to this catalog in this epoch. Claim it, if it is to be this catalog's."


def _why_older(attached: AttachedStore) -> str | None:
    try:
        attached.watch.newer_records.refuse()
    except StoreNotOurs as error:
        return str(error)
    except StoreError as error:
        return f"it does not answer ({error})."
    return None
