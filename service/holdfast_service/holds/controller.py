"""The controller `holds`: tells the stores which copies are held, and takes it back when no hold needs them any more.

It compares what is wanted with what the store was told, copy by copy, so it needs no history: a new copy of a held
chunk is locked like the first one, and a hold that was released, or has ended, frees what no other mirrored hold
needs.

    claim: `changing`, under a lease (committed) -> the store is told (no transaction) -> settle: `locked`, or nothing

Whatever may be locked says so in the catalog before the store is told, so a process that dies in between leaves no
lock that the catalog does not know: when its lease has run out the copy is told again what is wanted then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT, leave_candidates, object_key
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import COPY_LOCKED, Checkpoint, Chunk, ChunkListEntry, Copy, Run, Shard
from holdfast_service.db.tables.operations import Hold
from holdfast_service.holds.held import CopyLock, in_force
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import LockingStore, ObjectKey, StoreError
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

_WORTH_LOCKING = (*KEPT, CopyState.SUSPECT)


def mirrored(now: datetime) -> ColumnElement[bool]:
    """Over `holds`: in force, and wanted in the store as well."""
    return and_(Hold.mirror, in_force(now))


def to_lock(store_ids: Collection[int], now: datetime) -> ColumnElement[bool]:
    """Over `copies`: what the store is to hold (rule holds-outrank), the union over the checkpoints that share a chunk.
    A new copy of a held chunk is among them (repaired, or in a second store)."""
    return and_(
        worth_locking(store_ids),
        or_(Copy.lock.is_(None), Copy.lock != CopyLock.LOCKED),
        _needed(now),
        _free(now),
    )


def to_unlock(store_ids: Collection[int], now: datetime) -> ColumnElement[bool]:
    """Over `copies`, in whatever state: nothing that is locked can be deleted."""
    # The text of the partial index, so that it is used.
    return and_(
        text(COPY_LOCKED), Copy.store_id.in_(store_ids), Copy.state != CopyState.GONE, ~_needed(now), _free(now)
    )


def worth_locking(store_ids: Collection[int]) -> ColumnElement[bool]:
    """Over `copies`: there, and not known to be bad."""
    return and_(Copy.store_id.in_(store_ids), Copy.state.in_(_WORTH_LOCKING))


def is_chunk_of(hold_id: str) -> ColumnElement[bool]:
    """Over `copies`: of a chunk that the held checkpoint needs."""
    return Copy.chunk_id.in_(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(Hold, Hold.checkpoint_id == Shard.checkpoint_id)
        .where(Hold.id == hold_id)
    )


def _needed(now: datetime) -> ColumnElement[bool]:
    return Copy.chunk_id.in_(
        select(ChunkListEntry.chunk_id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .join(Hold, Hold.checkpoint_id == Shard.checkpoint_id)
        .where(mirrored(now))
    )


def _free(now: datetime) -> ColumnElement[bool]:
    return lease.has_run_out(Copy.leased_until, now)


NAME = "holds"
_BATCH = 100
_BATCHES_PER_ROUND = 100
_EVERY_ROUNDS = 6
_AT_ONCE = 8
_LEASE_SECONDS = 600
# What the store refused is not the first one again in this pass, or it would hold up the others.
_AFTER_FAILURE = timedelta(minutes=2)


@dataclass(frozen=True, kw_only=True)
class MirrorReport(ReconcileReport):
    """`done` copies were locked or unlocked."""

    locked: int = 0
    unlocked: int = 0


@dataclass(frozen=True)
class _Told:
    copy_id: int
    chunk_id: int
    project_id: str
    store_id: int
    key: ObjectKey
    version_id: str | None
    lease_token: str


@dataclass
class _Pass:
    """`silent`: stores that did not say whether they have Object Lock, or stopped answering in this pass."""

    stores: dict[int, LockingStore] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    changed: Counter[bool] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)  # by copy
    error: str | None = None


def reconcile(context: ServiceContext) -> MirrorReport:
    with context.database.read() as session:
        if not _anything_to_do(session):
            return MirrorReport()
    work = _Pass()
    for attached in context.stores:
        if isinstance(attached.store, LockingStore):
            try:
                if attached.store.has_object_lock():
                    work.stores[attached.store_id] = attached.store
            except StoreError as error:
                work.silent.add(attached.store_id)
                work.error = str(error)
    for on in (True, False):
        _tell_all(context, work, on=on)
    _settle_holds(context, work)
    return MirrorReport(
        done=work.changed.total(),
        failed=len(work.failures),
        error=work.error,
        locked=work.changed[True],
        unlocked=work.changed[False],
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """Holds that are not mirrored yet, and copies that are locked without a hold."""
    now = database_now(session)
    waiting, oldest = session.execute(
        select(func.count(), func.min(Hold.placed_at)).where(mirrored(now), Hold.mirrored_at.is_(None))
    ).one()
    idle = session.scalar(select(func.count()).select_from(Copy).where(to_unlock(context.store_ids, now)))
    leased = session.scalar(
        select(func.count())
        .select_from(Copy)
        .where(text(COPY_LOCKED), Copy.lock == CopyLock.CHANGING, Copy.leased_until > now)
    )
    return Backlog(due=waiting + int(idle or 0), leased=int(leased or 0), oldest_due_at=oldest)


def _anything_to_do(session: Session) -> bool:
    wanted = select(exists().where(mirrored(database_now(session))))
    return bool(session.scalar(wanted) or session.scalar(select(exists().where(text(COPY_LOCKED)).select_from(Copy))))


def _tell_all(context: ServiceContext, work: _Pass, *, on: bool) -> None:
    for _ in range(_BATCHES_PER_ROUND):
        if not work.stores:
            return
        claimed = context.database.run(lambda session: _claim(session, tuple(work.stores), on=on))
        if not claimed:
            return
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            failures = list(threads.map(lambda each: _tell(work.stores[each.store_id], each, on=on), claimed))
        _settle(context, work, claimed, failures, on=on)


def _claim(session: Session, store_ids: Sequence[int], *, on: bool) -> list[_Told]:
    now = database_now(session)
    rows = session.execute(
        select(Copy, Chunk.digest)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(to_lock(store_ids, now) if on else to_unlock(store_ids, now))
        .order_by(Copy.id)
        .limit(_BATCH)
        .with_for_update(of=Copy, skip_locked=True)
    ).all()
    token = lease.claim_locked(session, *(row.Copy for row in rows), seconds=_LEASE_SECONDS)
    claimed = []
    for copy, digest in rows:
        copy.lock = CopyLock.CHANGING
        key = object_key(copy.project_id, digest, copy)
        claimed.append(_Told(copy.id, copy.chunk_id, copy.project_id, copy.store_id, key, copy.version_id, token))
    session.flush()
    return claimed


def _tell(store: LockingStore, told: _Told, *, on: bool) -> StoreError | None:
    try:
        store.set_legal_hold(told.key, told.version_id, on=on)
    except StoreError as error:
        return error
    return None


def _settle(
    context: ServiceContext, work: _Pass, claimed: list[_Told], failures: list[StoreError | None], *, on: bool
) -> None:
    """Only with the lease: a process that has taken it meanwhile tells the store anew."""
    by_project: Counter[str] = Counter()
    with context.database.transaction() as session:
        later = database_now(session) + _AFTER_FAILURE
        for each, failure in zip(claimed, failures, strict=True):
            mine = Copy.id == each.copy_id
            if failure is not None:
                lease.give_back(session, Copy, each.lease_token, mine, until=later)
                work.failures[each.copy_id] = work.error = str(failure)
            elif lease.give_back(session, Copy, each.lease_token, mine, lock=CopyLock.LOCKED if on else None):
                by_project[each.project_id] += 1
        if not on:  # the collector has skipped what was locked
            leave_candidates(session, (each.chunk_id for each in claimed))
        for project_id, copies in sorted(by_project.items()):
            record_event(
                session,
                Actor.controller(NAME),
                "copy.lock" if on else "copy.unlock",
                project_id=project_id,
                after={"copies": copies},
            )
    work.changed[on] += by_project.total()
    for store_id in {
        each.store_id for each, failure in zip(claimed, failures, strict=True) if failure and failure.retryable
    }:
        # It is unavailable: another hundred time-outs would tell no more.
        del work.stores[store_id]
        work.silent.add(store_id)


def _settle_holds(context: ServiceContext, work: _Pass) -> None:
    """Says of each mirrored hold whether it is in the store, and if not, why."""
    with context.database.transaction() as session:
        now = database_now(session)
        rows = session.execute(
            select(Hold, Checkpoint.run_id, Run.project_id)
            .join(Checkpoint, Checkpoint.id == Hold.checkpoint_id)
            .join(Run, Run.id == Checkpoint.run_id)
            .where(mirrored(now))
            .order_by(Hold.id)
            .with_for_update(of=Hold)
        ).all()
        for hold, run_id, project_id in rows:
            whole, error = _state_of(session, work, hold.id)
            hold.mirror_error = error
            if whole is None:
                continue  # what was said stays, and nothing new is said
            if not whole:
                hold.mirrored_at = None
            elif hold.mirrored_at is None:
                hold.mirrored_at = now
                record_event(
                    session,
                    Actor.controller(NAME),
                    "hold.mirror",
                    project_id=project_id,
                    run_id=run_id,
                    checkpoint_id=hold.checkpoint_id,
                    after={"hold": hold.id},
                )


def _state_of(session: Session, work: _Pass, hold_id: str) -> tuple[bool | None, str | None]:
    """Whether the stores hold each copy, and if not, why. None: those that answer do, and another has copies, too."""
    failed = session.scalar(
        select(func.min(Copy.id)).where(Copy.id.in_(tuple(work.failures)), is_chunk_of(hold_id)).limit(1)
    )
    if failed is not None:
        return False, work.failures[failed]
    copies, locked = session.execute(
        select(func.count(), func.count().filter(Copy.lock == CopyLock.LOCKED)).where(
            worth_locking(tuple(work.stores)), is_chunk_of(hold_id)
        )
    ).one()
    if locked < copies:
        return False, work.error
    unheard = exists().where(worth_locking(tuple(work.silent)), is_chunk_of(hold_id))
    if work.silent and session.scalar(select(unheard)):
        return None, work.error
    if not work.stores:
        return False, "no attached store has Object Lock"
    return copies > 0, None if copies else "no store with Object Lock has a copy of it"


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop(NAME, settings.controller_interval_seconds * _EVERY_ROUNDS, reconcile, backlog),)
