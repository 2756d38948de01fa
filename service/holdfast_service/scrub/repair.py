"""A pass of repairing: another copy for each that was found bad, then the marks of checkpoints that are whole again.

What is bad is repaired from any store that has a good copy, or by a client that sends the same digest anew.
If none has, it is itself read again from time to time. A mark is taken back only when every chunk of the checkpoint
that was ever found damaged has a copy that was read since; of an archived one, which cannot be read before a thaw, the
store's own SHA-256 is asked for. The rotten copy itself is left to the collector.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

import structlog
from sqlalchemy import ColumnElement, Select, and_, exists, func, or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.copies.cold import note_class, store_says
from holdfast_service.copies.copy_chunk import (
    CopyTask,
    LeaseOverError,
    SourceBadError,
    StoreFailedError,
    TargetBadError,
    begin_copy,
    copy_now,
)
from holdfast_service.copies.corruption import (
    mark_readable,
    needed_by_a_checkpoint,
    read_since_damage,
    repair_if_whole,
)
from holdfast_service.copies.predicates import (
    KEPT,
    PROVEN,
    counts_as_read,
    in_archive,
    is_read_back,
    keeps_anywhere,
    reading_tells,
)
from holdfast_service.copies.read_back import (
    Claim,
    Finding,
    claim_bad,
    claim_copies,
    claim_first,
    copy_is_free,
    let_go,
    look_again,
    look_is_due,
    settle,
)
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import COPY_DAMAGED, Checkpoint, Chunk, ChunkListEntry, Copy, Shard
from holdfast_service.runs.views import WHOLE
from holdfast_service.scrub.read_copies import BATCH, Tally, keep_totals, read_one, total_of
from holdfast_service.stores.base import ClassedStore, StoreError
from holdfast_service.work.report import Backlog, ReconcileReport

# Repairs one copy that was found bad: its store gets another copy of the chunk, which counts once it was read.
#
#     claim the bad copy -> is there another good one in its store? read it (it may have been sent anew since)
#                        -> else copy from any store that has a good one (copies/copy_chunk.py), then read that
#                        -> settle: the bad copy is repaired, an event says so, and the collector may take it
#
# The bad copy's row is claimed with a lease, and the new copy's row with one of its own: a process that dies between
# any two of these steps leaves what the next one goes on from, and two at once do no harm. A new copy always has a
# generation of its own (rule random-generation), so what is rotten stays rotten and the two are never confused.

# Each try meets another rotten copy, or another's work that ended meanwhile.
_TRIES = 8
_AGAIN_AFTER = timedelta(minutes=1)

REPAIR = Actor.controller("repair")


class RepairResult(StrEnum):
    REPAIRED = "repaired"
    RETURNED = "read again, and it has the right bytes"
    LOST = "no store that is attached and answers has a good copy"
    LATER = "another process is at work on it"


@dataclass(frozen=True)
class Damaged:
    """A copy that was found bad, under a lease. `damage`: by its chunk's count of findings."""

    copy_id: int
    chunk_id: int
    store_id: int
    storage_class: str | None
    bad_at: datetime
    damage: int
    lease_token: str
    look_is_due: bool


def claim_damaged(session: Session, context: ServiceContext, copy: Copy) -> Damaged:
    """The row must be locked by the caller and free of another's lease."""
    assert copy.bad_at is not None
    token = lease.claim_locked(session, copy, seconds=context.settings.chunk_lease_seconds)
    session.flush()
    return Damaged(
        copy_id=copy.id,
        chunk_id=copy.chunk_id,
        store_id=copy.store_id,
        storage_class=copy.storage_class,
        bad_at=copy.bad_at,
        damage=copy.damage or 0,
        lease_token=token,
        look_is_due=look_is_due(copy, database_now(session)),
    )


def repair_copy(
    context: ServiceContext, damaged: Damaged, acquire: Callable[[int], None], tally: Tally
) -> RepairResult:
    """What came of it. Raises StoreError and `StoreFailedError` if a store does not answer, and `LeaseOverError`; the
    claim is then still the caller's to give back."""
    for _ in range(_TRIES):
        if _settle_repaired(context, damaged):
            tally.repaired += 1
            return RepairResult.REPAIRED
        claimed = context.database.run(lambda session: _claim_another(session, context, damaged))
        if claimed is not None:
            _read(context, claimed, acquire, tally)
            continue
        task = context.database.run(lambda session: _begin(session, context, damaged))
        if task is None:
            break
        try:
            copy_now(context, task, acquire)
        except (SourceBadError, TargetBadError):
            continue  # the one is suspect and the other bad now: the next try takes another
        tally.read_bytes += task.stored_bytes
    return context.database.run(lambda session: _give_up(session, damaged))


def look(context: ServiceContext, damaged: Damaged, acquire: Callable[[int], None], tally: Tally) -> RepairResult:
    """Reads the bad copy itself again, where there is no other to repair it from: its store may have been wrong, or
    somebody has put it back. Raises StoreError; the claim is then still the caller's to give back."""
    claimed = context.database.run(lambda session: claim_bad(session, context, damaged.copy_id))

    def on_bytes(count: int) -> None:
        tally.read_bytes += count
        acquire(count)

    if claimed is None or look_again(context, claimed, REPAIR, on_bytes) is not Finding.GOOD:
        return RepairResult.LOST
    tally.repaired += 1
    return RepairResult.RETURNED


def defer(context: ServiceContext, damaged: Damaged) -> None:
    """Gives the claim back: it is due again, but does not hold up the others."""
    with context.database.transaction() as session:
        session.execute(
            update(Copy)
            .where(
                Copy.id == damaged.copy_id,
                Copy.state == CopyState.BAD,
                # It is free, or this look has claimed it.
                or_(Copy.leased_until.is_(None), Copy.lease_token == damaged.lease_token),
            )
            .values(lease.ended(database_now(session) + _AGAIN_AFTER))
        )


def _read(context: ServiceContext, claimed: Claim, acquire: Callable[[int], None], tally: Tally) -> None:
    try:
        tally.add(read_one(context, claimed, REPAIR, acquire))
    except StoreError:
        let_go(context, claimed)
        raise


def _claim_another(session: Session, context: ServiceContext, damaged: Damaged) -> Claim | None:
    """A copy in the same store that would do, once it was read: in the cold store a cold one."""
    now = database_now(session)
    return claim_first(
        session,
        Copy.chunk_id == damaged.chunk_id,
        Copy.store_id == damaged.store_id,
        Copy.state.in_(KEPT),
        is_read_back(context),
        reading_tells(now),
        copy_is_free(now),
        seconds=context.settings.chunk_lease_seconds,
    )


def _begin(session: Session, context: ServiceContext, damaged: Damaged) -> CopyTask | None:
    return begin_copy(session, context, damaged.chunk_id, damaged.store_id, storage_class=damaged.storage_class)


def _settle_repaired(context: ServiceContext, damaged: Damaged) -> bool:
    """Whether a copy in the same store was read since the damage: then it is repaired, and an event says so.

    Before that the checkpoints that were cold for lack of it become hot: a process that dies in between leaves the
    damage, and the next one goes through them again.
    """
    with context.database.read() as session:
        if session.scalar(_good_copy(damaged)) is None:
            return False
    mark_readable(context.database, damaged.chunk_id, actor=REPAIR)

    def end(session: Session) -> bool:
        digest = session.scalar(select(Chunk.digest).where(Chunk.id == damaged.chunk_id).with_for_update())
        good = session.scalar(_good_copy(damaged))
        # None: the lease was lost, or the copy was collected.
        is_bad = (Copy.id == damaged.copy_id, Copy.state == CopyState.BAD)
        bad = lease.locked(session, Copy, damaged.lease_token, *is_bad)
        if good is None or bad is None:
            return False
        bad.repaired_at = database_now(session)
        lease.end_locked(bad)
        record_event(
            session,
            REPAIR,
            "copy.repair",
            project_id=bad.project_id,
            reason=f"The copy {bad.finding}; another one was made and read.",
            before={"chunk": digest, "store": bad.store_id, "copy": bad.id, "bad_at": damaged.bad_at.isoformat()},
            after={"chunk": digest, "store": bad.store_id, "copy": good},
        )
        return True

    return context.database.run(end)


def _good_copy(damaged: Damaged) -> Select[int]:
    return (
        select(Copy.id)
        .where(
            _stands_for(damaged),
            Copy.state.in_(KEPT),
            counts_as_read(),
            Copy.read_after >= damaged.damage,
        )
        .order_by(Copy.id)
        .limit(1)
    )


def _stands_for(damaged: Damaged) -> ColumnElement[bool]:
    """Over `copies`: of its chunk, in its store. What must be thawed does not stand for what could be read at once."""
    same = and_(Copy.chunk_id == damaged.chunk_id, Copy.store_id == damaged.store_id)
    return same if damaged.storage_class in ARCHIVED else and_(same, ~in_archive())


def _give_up(session: Session, damaged: Damaged) -> RepairResult:
    """Another worker's copy that is under way, or being read, is no loss."""
    at_work = session.scalar(
        select(Copy.id)
        .where(_stands_for(damaged), Copy.state.in_((*KEPT, CopyState.COPYING, CopyState.SUSPECT, CopyState.PENDING)))
        .limit(1)
    )
    return RepairResult.LOST if at_work is None else RepairResult.LATER


# Passes of the controllers' pause between two of this one; so long it may take, and then there is no pause.
EVERY_ROUNDS = 12
_PORTION = 50

_log = structlog.get_logger("holdfast.scrub")


@dataclass(frozen=True, kw_only=True)
class RepairReport(ReconcileReport):
    """`lost_copies`: no store has a good one to repair them from now."""

    repaired_copies: int = 0
    lost_copies: int = 0
    read_bytes: int = 0
    repaired_checkpoints: tuple[str, ...] = ()
    corrupt_checkpoints: tuple[str, ...] = ()


@dataclass
class _Pass:
    by_store: dict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))
    lost: int = 0
    failed: int = 0
    error: str | None = None

    def fail(self, error: Exception) -> None:
        self.failed += 1
        self.error = str(error)
        _log.warning("not_repaired", reason=str(error))


def reconcile(context: ServiceContext) -> RepairReport:
    """Repairs for about the interval of its passes, or until nothing is due."""
    doing = _Pass()
    repaired: list[str] = []
    ends_at = time.monotonic() + context.settings.controller_interval_seconds * EVERY_ROUNDS
    try:
        _repair_what_is_due(context, doing, ends_at)
        _unmark_what_changed(context, doing, ends_at, repaired)
    finally:
        keep_totals(context.database, doing.by_store)
    total = total_of(doing.by_store)
    return RepairReport(
        done=total.repaired + len(repaired),
        failed=doing.failed,
        error=doing.error,
        repaired_copies=total.repaired,
        lost_copies=doing.lost,
        read_bytes=total.read_bytes,
        repaired_checkpoints=tuple(repaired),
        corrupt_checkpoints=tuple(sorted(total.marked)),
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    free = copy_is_free(database_now(session))
    due, leased, oldest = session.execute(
        select(func.count().filter(free), func.count().filter(~free), func.min(Copy.bad_at)).where(
            text(f"({COPY_DAMAGED})"), Copy.store_id.in_(context.store_ids), needed_by_a_checkpoint()
        )
    ).one()
    return Backlog(due, leased, oldest)


def _repair_what_is_due(context: ServiceContext, doing: _Pass, ends_at: float) -> None:
    store_ids = set(context.store_ids)
    while store_ids and time.monotonic() < ends_at and not context.stopping.is_set():
        damaged = context.database.run(lambda session: _claim_one(session, context, store_ids))
        if damaged is None:
            return
        try:
            tally = doing.by_store[damaged.store_id]
            result = repair_copy(context, damaged, context.read_rate_limit.acquire, tally)
            if result is RepairResult.LOST and damaged.look_is_due:
                result = look(context, damaged, context.read_rate_limit.acquire, tally)
        except StoreFailedError as error:
            doing.fail(error)
            store_ids.discard(error.store_id)
        except StoreError as error:
            doing.fail(error)
            store_ids.discard(damaged.store_id)
        except LeaseOverError as error:
            doing.fail(error)
        else:
            if result in (RepairResult.REPAIRED, RepairResult.RETURNED):
                continue
            doing.lost += result is RepairResult.LOST
        defer(context, damaged)


def _claim_one(session: Session, context: ServiceContext, store_ids: set[int]) -> Damaged | None:
    copy = session.scalars(
        select(Copy)
        .where(
            # The text of the partial index, so that it is used.
            text(f"({COPY_DAMAGED})"),
            Copy.store_id.in_(store_ids),
            copy_is_free(database_now(session)),
            needed_by_a_checkpoint(),
        )
        .order_by(Copy.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    ).one_or_none()
    return None if copy is None else claim_damaged(session, context, copy)


def _unmark_what_changed(context: ServiceContext, doing: _Pass, ends_at: float, repaired: list[str]) -> None:
    """A portion in any case, however long the fixing took. A store that fails is asked once."""
    store_ids = set(context.store_ids)
    portion = _changed(context, store_ids, "")
    while portion:
        for checkpoint_id in portion:
            if context.stopping.is_set():
                return
            try:
                if unmark(context, checkpoint_id, doing.by_store, store_ids):
                    repaired.append(checkpoint_id)
            except StoreFailedError as error:
                doing.fail(error)
                store_ids.discard(error.store_id)
        if time.monotonic() >= ends_at:
            return
        portion = _changed(context, store_ids, portion[-1])


def _changed(context: ServiceContext, store_ids: Collection[int], after: str) -> list[str]:
    """Corrupt checkpoints that no process has looked at, or whose chunk that stood in the way is whole now or may be
    once it is read. Each look leaves what stands in the way, so the next process does not repeat it."""
    with context.database.read() as session:
        now = database_now(session)
        readable = and_(_can_be_proven(context, store_ids, now), copy_is_free(now))
        stands_no_more = exists().where(
            Copy.chunk_id == Checkpoint.lost_chunk_id,
            keeps_anywhere(Checkpoint.attempt_id),
            or_(read_since_damage(), readable),
        )
        # The text of the partial index, so that it is used.
        return list(
            session.scalars(
                select(Checkpoint.id)
                .where(
                    text("health = 'corrupt'"),
                    Checkpoint.state.in_(WHOLE),
                    Checkpoint.id > after,
                    or_(Checkpoint.lost_chunk_id.is_(None), stands_no_more),
                )
                .order_by(Checkpoint.id)
                .limit(_PORTION)
            ).all()
        )


def unmark(
    context: ServiceContext, checkpoint_id: str, by_store: dict[int, Tally], store_ids: Collection[int] | None = None
) -> bool:
    """Reads what keeps its damaged chunks and was not read since, from these stores or from all that are attached; then
    takes the mark away if all of them are there. What is archived it asks the store for. Raises StoreFailedError if a
    store cannot tell."""
    among = context.store_ids if store_ids is None else store_ids
    untold: set[int] = set()
    while claims := context.database.run(lambda session: _claim_unread(session, context, checkpoint_id, among, untold)):
        for position, claimed in enumerate(claims):
            try:
                if claimed.state_before is CopyState.COLD:
                    tally = _ask_store(context, claimed, untold)
                else:
                    tally = read_one(context, claimed, REPAIR, context.read_rate_limit.acquire)
            except StoreError as error:
                for left in claims[position:]:
                    let_go(context, left)
                raise StoreFailedError(claimed.store_id, error) from error
            by_store.setdefault(claimed.store_id, Tally()).add(tally)
    with context.database.transaction() as session:
        return repair_if_whole(session, checkpoint_id, actor=REPAIR)


def _ask_store(context: ServiceContext, claimed: Claim, untold: set[int]) -> Tally:
    """What the store's own SHA-256 says of an archived copy, settled. If the store has none of it, the copy joins
    `untold`. Raises StoreError; the lease is then still the caller's to give back."""
    tally = Tally()
    says = store_says(context, claimed)
    if says is None or says.finding is None:
        untold.add(claimed.copy_id)
        let_go(context, claimed)
    elif says.finding is not Finding.GOOD:
        tally.note(says.finding)
        tally.marked.update(settle(context, claimed, says.finding, REPAIR) or ())
    elif says.storage_class != claimed.storage_class:
        note_class(context, claimed, says.storage_class, REPAIR)
    else:
        damages = select(Chunk.damages).where(Chunk.id == claimed.chunk_id).scalar_subquery()
        with context.database.transaction() as session:
            lease.give_back(session, Copy, claimed.lease_token, Copy.id == claimed.copy_id, read_after=damages)
    return tally


def _can_be_proven(context: ServiceContext, store_ids: Collection[int], now: datetime) -> ColumnElement[bool]:
    """Over `copies`, in one of these stores: it can be read now and that tells something, or its store hashes what it
    has archived."""
    hashing = [
        each.store_id
        for each in context.stores
        if isinstance(each.store, ClassedStore)
        and each.store.capabilities is not None
        and each.store.capabilities.sha256_enforced
    ]
    archived = and_(Copy.state == CopyState.COLD, in_archive(), Copy.proof.in_(PROVEN), Copy.store_id.in_(hashing))
    readable = and_(Copy.state == CopyState.VERIFIED, reading_tells(now))
    return and_(Copy.store_id.in_(store_ids), or_(readable, archived))


def _claim_unread(
    session: Session,
    context: ServiceContext,
    checkpoint_id: str,
    store_ids: Collection[int],
    untold: Collection[int],
) -> list[Claim]:
    """A batch of the copies that would keep it whole if only they were read: of chunks that have no other that was.
    Without those of which their store told nothing just now (`untold`)."""
    attempt_id = session.scalar(select(Checkpoint.attempt_id).where(Checkpoint.id == checkpoint_id))
    if attempt_id is None:
        return []
    lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
    chunks = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
    whole, now = keeps_anywhere(attempt_id), database_now(session)
    read = select(Copy.chunk_id).where(Copy.chunk_id.in_(chunks), whole, read_since_damage()).correlate(None)
    return claim_copies(
        session,
        Copy.chunk_id.in_(chunks),
        Copy.id.not_in(untold),
        _can_be_proven(context, store_ids, now),
        whole,
        ~read_since_damage(),
        Copy.chunk_id.not_in(read),
        copy_is_free(now),
        seconds=context.settings.chunk_lease_seconds,
        most=BATCH,
    )
