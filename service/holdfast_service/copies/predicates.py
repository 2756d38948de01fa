"""Which copies of a chunk can be relied on, by whom (rules reuse-only-hashed and present-is-referenced), and what their
place makes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, exists, false, func, literal, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from holdfast_protocol.states import CopyState, Proof, StoreRole
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Checkpoint, ChunkListEntry, Copy, Shard
from holdfast_service.db.tables.operations import CollectCandidate
from holdfast_service.stores.base import Capabilities, ObjectFacts, ObjectKey

_AT_HAND = (CopyState.VERIFIED, CopyState.SUSPECT)


def in_cold_store(context: ServiceContext, store_id: int) -> bool:
    cold = context.attached(StoreRole.COLD)
    return cold is not None and cold.store_id == store_id


def kept_state(context: ServiceContext, store_id: int, storage_class: str | None) -> CopyState:
    """The state of a good copy there: cold if no reader is sent to it before a thaw. The service itself can read what
    lies in the cold store nevertheless, and scrubs it like any other."""
    cold = in_cold_store(context, store_id) or storage_class in ARCHIVED
    return CopyState.COLD if cold else CopyState.VERIFIED


def can_be_read(context: ServiceContext, copy: Copy) -> bool:
    """Whether the service may read it back as it is."""
    if copy.state in _AT_HAND:
        return True
    cold = copy.state == CopyState.COLD and in_cold_store(context, copy.store_id)
    return cold and copy.storage_class not in ARCHIVED


def is_read_back(context: ServiceContext) -> ColumnElement[bool]:
    """The same over `copies`."""
    cold = context.attached(StoreRole.COLD)
    in_cold = false() if cold is None else and_(Copy.state == CopyState.COLD, Copy.store_id == cold.store_id)
    at_once = or_(Copy.storage_class.is_(None), Copy.storage_class.not_in(ARCHIVED))
    return or_(Copy.state.in_(_AT_HAND), and_(in_cold, at_once))


def proof_of(facts: ObjectFacts, capabilities: Capabilities | None) -> Proof:
    """A checksum proves something only if the store was seen to compute it; none at all proves nothing."""
    enforced = capabilities is not None and capabilities.sha256_enforced
    return Proof.STORE_SHA256 if facts.sha256 is not None and enforced else Proof.UNPROVEN


PROVEN = (Proof.STORE_SHA256, Proof.READ)
KEPT = (CopyState.VERIFIED, CopyState.COLD, CopyState.THAWING)


def in_archive(copy: type[Copy] = Copy) -> ColumnElement[bool]:
    """Over `copies`: its class must be thawed before a read. Never null, so that its opposite can be asked for."""
    return and_(copy.storage_class.is_not(None), copy.storage_class.in_(ARCHIVED))


def counts_as_read(copy: type[Copy] = Copy) -> ColumnElement[bool]:
    """Over `copies`: the service has read it; or it lies in an archive, where the store's own SHA-256 counts."""
    return or_(copy.proof == Proof.READ, and_(in_archive(copy), copy.proof.in_(PROVEN)))


def reading_tells(now: datetime) -> ColumnElement[bool]:
    """Over `copies`: to read it again can prove more. What was read while a ticket can overwrite it is proven by no
    reading before that ticket is over (rule no-ticket-reuse)."""
    return or_(Copy.proof.is_distinct_from(Proof.READ_EARLY), Copy.overwritable_until <= now)


def usable_by(copy: Copy, attempt_id: int) -> bool:
    """Verified, and either proven to hold the chunk's bytes or uploaded by this very attempt.

    A copy whose bytes only its client has hashed is good for its own attempt: what that client mixed up can
    spoil its own checkpoint, and never another's.
    """
    return copy.state == CopyState.VERIFIED and (copy.proof in PROVEN or copy.attempt_id == attempt_id)


def is_usable_by(store_id: int, attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """The same for a query over `copies`, in the one store that is asked about."""
    return and_(
        Copy.store_id == store_id,
        Copy.state == CopyState.VERIFIED,
        or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id),
    )


def keeps_whole(store_ids: Collection[int], attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """Whether a copy keeps its chunk readable from these stores: it is good, though it may have to be thawed first."""
    return and_(Copy.store_id.in_(store_ids), keeps_anywhere(attempt_id))


def keeps_anywhere(attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """The same in any store of the catalog: what this process has not attached is not lost."""
    return and_(Copy.state.in_(KEPT), or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id))


def may_keep(attempt_id: int | InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """No process has found this copy bad, whatever its store: while there is one, its chunk is not said to be lost.
    What is suspect was not read yet, and may be good."""
    return and_(Copy.state.in_((*KEPT, CopyState.SUSPECT)), or_(Copy.proof.in_(PROVEN), Copy.attempt_id == attempt_id))


def is_readable(
    store_ids: Collection[int],
    attempt_id: int | InstrumentedAttribute[int],
    *,
    until: datetime | None = None,
    copy: type[Copy] = Copy,
) -> ColumnElement[bool]:
    """Over `copies`: a reader of this attempt's checkpoints can read it now, from one of these stores. What is thawed
    counts where it stays so `until` then; without a moment only what needs no thaw does."""
    return and_(copy.store_id.in_(store_ids), is_readable_anywhere(attempt_id, until=until, copy=copy))


def is_readable_anywhere(
    attempt_id: int | InstrumentedAttribute[int], *, until: datetime | None = None, copy: type[Copy] = Copy
) -> ColumnElement[bool]:
    """The same in any store of the catalog, whatever this process has attached.

    A thawed copy stays cold in name, because only a reader may rely on it. A suspect one in an archive is no more
    readable than a cold one."""
    at_once = or_(copy.storage_class.is_(None), copy.storage_class.not_in(ARCHIVED))
    there = or_(copy.state == CopyState.VERIFIED, and_(copy.state == CopyState.SUSPECT, at_once))
    if until is not None:
        thawed = copy.state.in_((CopyState.COLD, CopyState.SUSPECT))
        there = or_(there, and_(thawed, copy.readable_until >= until))
    return and_(there, or_(copy.proof.in_(PROVEN), copy.attempt_id == attempt_id))


def is_in(store_id: int, chunk_id: InstrumentedAttribute[int]) -> ColumnElement[bool]:
    """Whether a store holds a copy of the chunk that is good for every attempt; it may have to be thawed first."""
    kept = aliased(Copy)
    return exists().where(
        kept.chunk_id == chunk_id, kept.store_id == store_id, kept.state.in_(KEPT), kept.proof.in_(PROVEN)
    )


def object_key(project_id: str, digest: str, copy: Copy) -> ObjectKey:
    """If a ticket could overwrite the object, its version is named if the store has versions (rule
    no-ticket-reuse). Elsewhere not: to read a version takes a permission of its own."""
    return ObjectKey(
        project_id, digest, copy.generation, copy.version_id if copy.overwritable_until is not None else None
    )


def stays_as_read(copy: Copy, now: datetime) -> bool:
    """Whether what is read from now on is what stays: no ticket can overwrite it any more, or its version is named."""
    return copy.overwritable_until is None or copy.version_id is not None or copy.overwritable_until <= now


_ROWS_PER_STATEMENT = 5000


def leave_candidates(session: Session, chunk_ids: Iterable[int]) -> None:
    """Chunks that the collector must check: the transaction that takes a reference or a use from a chunk leaves the
    chunk here. The collector's full scan finds the rest, only later. Due at once; a candidate that is there already
    keeps its time."""
    wanted: Sequence[int] = sorted(set(chunk_ids))
    if not wanted:
        return
    now = database_now(session)
    for first in range(0, len(wanted), _ROWS_PER_STATEMENT):
        portion = wanted[first : first + _ROWS_PER_STATEMENT]
        insert_absent(session, CollectCandidate, [{"chunk_id": chunk_id, "due_at": now} for chunk_id in portion])


def leave_selected(session: Session, chunk_ids: Select[Any]) -> None:
    """The same for what a query finds, without bringing it here: a job's lists may hold millions."""
    found = chunk_ids.distinct().subquery()
    column = next(iter(found.c))
    # Sorted, or two who leave the same chunks would wait for each other in a circle. `true` keeps SQLite's parser from
    # taking ON CONFLICT for a join's ON.
    rows = select(column, literal(database_now(session), CollectCandidate.due_at.type)).where(literal(True))
    rows = rows.order_by(column)
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    session.execute(insert(CollectCandidate).from_select(["chunk_id", "due_at"], rows).on_conflict_do_nothing())


def oldest_attempts(session: Session, chunk_ids: Sequence[int]) -> dict[int, int]:
    """By chunk, the oldest attempt with a checkpoint that lists it; none for a chunk that nothing needs."""
    rows = session.execute(
        select(ChunkListEntry.chunk_id, func.min(Checkpoint.attempt_id).label("attempt_id"))
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(Checkpoint, Checkpoint.id == Shard.checkpoint_id)
        .where(ChunkListEntry.chunk_id.in_(chunk_ids))
        .group_by(ChunkListEntry.chunk_id)
    )
    return {row.chunk_id: row.attempt_id for row in rows}
