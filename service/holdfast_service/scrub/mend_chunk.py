"""Heals one copy that was found bad: its store gets another copy of the chunk, which counts once it was read.

    claim the bad copy -> is there another good one in its store? read it (it may have been sent anew since)
                       -> else copy from any store that has a good one (catalog/copying.py), then read that
                       -> settle: the bad copy is healed, an event says so, and the collector may take it

The bad copy's row is claimed with a lease, and the new copy's row with one of its own: a process that dies between any
two of these steps leaves what the next one goes on from, and two at once do no harm. A new copy always has a generation
of its own (protocol rule 17), so what is rotten stays rotten and nobody confuses the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import and_, or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, Proof
from holdfast_protocol.tiers import ARCHIVED
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.copies import KEPT, PROVEN
from holdfast_service.catalog.copying import CopyTask, SourceBadError, TargetBadError, begin_copy, copy_now
from holdfast_service.catalog.reread import Claim, Finding, claim, claim_bad, is_free, let_go, look_again, look_is_due
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.scrub.read_copies import lease, read_one
from holdfast_service.scrub.tally import Tally
from holdfast_service.stores.base import StoreError

# Each try meets another rotten copy, or another's work that ended meanwhile.
_TRIES = 8
_AGAIN_AFTER = timedelta(minutes=1)

HEAL = Actor.controller("heal")


class Mended(StrEnum):
    HEALED = "healed"
    RETURNED = "read again, and it has the right bytes"
    LOST = "no store that is attached and answers has a good copy"
    LATER = "somebody else is at work on it"


@dataclass(frozen=True)
class Damaged:
    """A copy that was found bad, claimed until `leased_until`, which is the lease's token. `damage`: by its chunk's
    count of findings."""

    copy_id: int
    chunk_id: int
    store_id: int
    storage_class: str | None
    bad_at: datetime
    damage: int
    leased_until: datetime
    look_is_due: bool


def claim_damaged(session: Session, context: ServiceContext, copy: Copy) -> Damaged:
    """The row must be locked by the caller and free of another's lease."""
    assert copy.bad_at is not None
    now = database_now(session)
    copy.leased_until = now + lease(context)
    session.flush()
    return Damaged(
        copy_id=copy.id,
        chunk_id=copy.chunk_id,
        store_id=copy.store_id,
        storage_class=copy.storage_class,
        bad_at=copy.bad_at,
        damage=copy.damage or 0,
        leased_until=copy.leased_until,
        look_is_due=look_is_due(copy, now),
    )


def mend(context: ServiceContext, damaged: Damaged, spend: Callable[[int], None], tally: Tally) -> Mended:
    """What came of it. Raises StoreError and `StoreFailedError` if a store does not answer, and `LeaseOverError`; the
    claim is then still the caller's to give back."""
    for _ in range(_TRIES):
        if _settle_healed(context, damaged):
            tally.healed += 1
            return Mended.HEALED
        claimed = context.database.run(lambda session: _claim_another(session, context, damaged))
        if claimed is not None:
            _read(context, claimed, spend, tally)
            continue
        task = context.database.run(lambda session: _begin(session, context, damaged))
        if task is None:
            break
        try:
            copy_now(context, task, spend)
        except (SourceBadError, TargetBadError):
            continue  # the one is suspect and the other bad now: the next try takes another
        tally.read_bytes += task.stored_bytes
    return context.database.run(lambda session: _give_up(session, damaged))


def look(context: ServiceContext, damaged: Damaged, spend: Callable[[int], None], tally: Tally) -> Mended:
    """Reads the bad copy itself again, where there is no other to heal it from: its store may have been wrong, or
    somebody has put it back. Raises StoreError; the claim is then still the caller's to give back."""
    claimed = context.database.run(lambda session: claim_bad(session, context, damaged.copy_id))

    def on_bytes(count: int) -> None:
        tally.read_bytes += count
        spend(count)

    if claimed is None or look_again(context, claimed, HEAL, on_bytes) is not Finding.GOOD:
        return Mended.LOST
    tally.healed += 1
    return Mended.RETURNED


def put_off(context: ServiceContext, damaged: Damaged) -> None:
    """Gives the claim back: it is due again, but does not hold up the others."""
    with context.database.transaction() as session:
        session.execute(
            update(Copy)
            .where(
                Copy.id == damaged.copy_id,
                Copy.state == CopyState.BAD,
                # It is nobody's after it was looked at.
                or_(Copy.leased_until.is_(None), Copy.leased_until == damaged.leased_until),
            )
            .values(leased_until=database_now(session) + _AGAIN_AFTER)
        )


def _read(context: ServiceContext, claimed: Claim, spend: Callable[[int], None], tally: Tally) -> None:
    try:
        tally.add(read_one(context, claimed, HEAL, spend))
    except StoreError:
        let_go(context, claimed)
        raise


def _claim_another(session: Session, context: ServiceContext, damaged: Damaged) -> Claim | None:
    """A copy in the same store that would do, once it was read."""
    row = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(
            Copy.chunk_id == damaged.chunk_id,
            Copy.store_id == damaged.store_id,
            Copy.state == CopyState.VERIFIED,
            is_free(database_now(session)),
        )
        .order_by(Copy.id)
        .limit(1)
        .with_for_update(of=Copy, skip_locked=True)
    ).one_or_none()
    until = database_now(session) + lease(context)
    return None if row is None else claim(session, row.Chunk, row.Copy, until, suspect=False)


def _begin(session: Session, context: ServiceContext, damaged: Damaged) -> CopyTask | None:
    return begin_copy(session, context, damaged.chunk_id, damaged.store_id, storage_class=damaged.storage_class)


def _settle_healed(context: ServiceContext, damaged: Damaged) -> bool:
    """Whether a copy in the same store was read since the damage: then it is healed, and an event says so."""

    def settle(session: Session) -> bool:
        digest = session.scalar(select(Chunk.digest).where(Chunk.id == damaged.chunk_id).with_for_update())
        good = session.scalar(
            select(Copy.id)
            .where(
                Copy.chunk_id == damaged.chunk_id,
                Copy.store_id == damaged.store_id,
                Copy.state.in_(KEPT),
                # What lies in an archive nobody reads before a thaw: there the store's own SHA-256 counts.
                or_(Copy.proof == Proof.READ, and_(Copy.proof.in_(PROVEN), Copy.storage_class.in_(ARCHIVED))),
                Copy.read_after >= damaged.damage,
            )
            .order_by(Copy.id)
            .limit(1)
        )
        bad = _locked(session, damaged)
        if good is None or bad is None:
            return False
        bad.healed_at, bad.leased_until = database_now(session), None
        record_event(
            session,
            HEAL,
            "copy.heal",
            project_id=bad.project_id,
            reason=f"The copy {bad.finding}; another one was made and read.",
            before={"chunk": digest, "store": bad.store_id, "copy": bad.id, "bad_at": damaged.bad_at.isoformat()},
            after={"chunk": digest, "store": bad.store_id, "copy": good},
        )
        return True

    return context.database.run(settle)


def _give_up(session: Session, damaged: Damaged) -> Mended:
    """Another worker's copy that is under way, or being read, is no loss."""
    at_work = session.scalar(
        select(Copy.id)
        .where(
            Copy.chunk_id == damaged.chunk_id,
            Copy.store_id == damaged.store_id,
            Copy.state.in_((*KEPT, CopyState.COPYING, CopyState.SUSPECT, CopyState.PENDING)),
        )
        .limit(1)
    )
    return Mended.LOST if at_work is None else Mended.LATER


def _locked(session: Session, damaged: Damaged) -> Copy | None:
    """None: the lease was lost, or the copy was collected."""
    return session.execute(
        select(Copy)
        .where(Copy.id == damaged.copy_id, Copy.state == CopyState.BAD, Copy.leased_until == damaged.leased_until)
        .with_for_update(),
        execution_options={"populate_existing": True},
    ).scalar_one_or_none()
