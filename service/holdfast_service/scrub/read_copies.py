"""Claims the copies that are due, reads them back and settles them, store by store: proving and scrubbing are this.

A copy is claimed with a lease, so any number of processes share the work, and a killed one's copies come due again. A
store that is unavailable, or not this catalog's, proves nothing and stops only its own part of the pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from sqlalchemy import ColumnElement, TextClause, and_, func, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.audit.record import Actor
from holdfast_service.context import ServiceContext
from holdfast_service.copies.cold import note_archived
from holdfast_service.copies.read_back import (
    Claim,
    Finding,
    claim_copies,
    copy_is_free,
    read_back,
    settle,
    store_of_copy,
)
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Copy
from holdfast_service.db.tables.operations import ScrubTotal
from holdfast_service.stores.base import ObjectArchived, ObjectMismatch, ObjectMissing, StoreError
from holdfast_service.work.report import Backlog


def seems_fine(context: ServiceContext, claimed: Claim) -> bool:
    """The cheap check: sizes and checksums that the store reports, without reading. Raises StoreError if the store
    cannot tell.

    It finds what is missing or cut, and rot only if the store itself computes checksums. A copy that does not seem fine
    is read back, and only that decides; a copy that seems fine is not read by it, and its next scrub comes no later.
    """
    try:
        facts = store_of_copy(context, claimed).head(claimed.key)
    except (ObjectMissing, ObjectMismatch):
        return False
    return facts.bytes == claimed.stored_bytes and facts.sha256 in (None, claimed.stored_digest)


@dataclass
class Tally:
    """The counts of one pass or one operation. `marked`: ids of the checkpoints that are corrupt by it."""

    good: int = 0
    bad: int = 0
    missing: int = 0
    read_bytes: int = 0
    repaired: int = 0
    marked: set[str] = field(default_factory=set)

    @property
    def settled(self) -> int:
        return self.good + self.bad + self.missing

    def note(self, finding: Finding) -> None:
        if finding is Finding.GOOD:
            self.good += 1
        elif finding is Finding.MISSING:
            self.missing += 1
        else:
            self.bad += 1

    def add(self, other: Tally) -> None:
        self.good, self.bad, self.missing = self.good + other.good, self.bad + other.bad, self.missing + other.missing
        self.read_bytes, self.repaired = self.read_bytes + other.read_bytes, self.repaired + other.repaired
        self.marked |= other.marked


def total_of(by_store: Mapping[int, Tally]) -> Tally:
    total = Tally()
    for tally in by_store.values():
        total.add(tally)
    return total


def keep_totals(database: Database, by_store: Mapping[int, Tally]) -> None:
    """Adds them to the catalog's: at the end of a pass, because all processes share these rows."""
    for store_id, tally in sorted(by_store.items()):
        if not (tally.settled or tally.read_bytes or tally.repaired):
            continue
        with database.transaction() as session:
            insert_absent(session, ScrubTotal, [{"store_id": store_id}])
            session.execute(
                update(ScrubTotal)
                .where(ScrubTotal.store_id == store_id)
                .values(
                    read_copies=ScrubTotal.read_copies + tally.settled,
                    read_bytes=ScrubTotal.read_bytes + tally.read_bytes,
                    bad_copies=ScrubTotal.bad_copies + tally.bad + tally.missing,
                    repaired_copies=ScrubTotal.repaired_copies + tally.repaired,
                )
            )


BATCH = 8
# A copy that the store could not give is not the first one again in the next pass, or it would hold up the others.
_AFTER_FAILURE = timedelta(seconds=30)

_log = structlog.get_logger("holdfast.scrub")


@dataclass(frozen=True)
class Due:
    """Which copies of a store are due now, and which of them come first."""

    condition: Callable[[datetime, AttachedStore], ColumnElement[bool] | TextClause]
    first: InstrumentedAttribute[int] | InstrumentedAttribute[datetime | None]


@dataclass
class Reading:
    """What came of a pass. `problems`: the store's role and why its part was stopped."""

    by_store: dict[int, Tally] = field(default_factory=dict)
    failed: int = 0
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str | None:
        return "; ".join(f"{role} store: {why}" for role, why in self.problems.items()) or None


def read_due(context: ServiceContext, actor: Actor, due: Due, acquire: Callable[[int], None]) -> Reading:
    """Reads for about one interval, or until nothing is due: a batch of each store in turn."""
    reading = Reading({attached.store_id: Tally() for attached in context.stores})
    ends_at = time.monotonic() + context.settings.controller_interval_seconds
    left = list(context.stores)
    try:
        while left:
            left = [
                attached for attached in left if _read_batch(context, actor, due, attached, reading, acquire=acquire)
            ]
            if time.monotonic() >= ends_at or context.stopping.is_set():
                break
    finally:
        keep_totals(context.database, reading.by_store)
    return reading


def _read_batch(
    context: ServiceContext,
    actor: Actor,
    due: Due,
    attached: AttachedStore,
    reading: Reading,
    *,
    acquire: Callable[[int], None],
) -> bool:
    """Whether there may be more to read in this store."""
    claims = context.database.run(lambda session: _claim_due(session, context, due, attached))
    for position, claimed in enumerate(claims):
        try:
            tally = read_one(context, claimed, actor, acquire)
        except StoreError as error:
            _defer(context, claims[position:])
            reading.failed += 1
            reading.problems[attached.role.value] = str(error)
            _log.warning("store_not_read", store=attached.role.value, reason=str(error))
            return False
        reading.by_store[attached.store_id].add(tally)
    return len(claims) == BATCH


def read_one(context: ServiceContext, claimed: Claim, actor: Actor, acquire: Callable[[int], None]) -> Tally:
    """Raises StoreError if the copy's store cannot tell; the lease is then still the caller's to give back."""
    tally = Tally()

    def on_bytes(count: int) -> None:
        tally.read_bytes += count
        acquire(count)

    finding: Finding | None
    try:
        finding = read_back(context, claimed, on_bytes)
    except ObjectArchived:
        finding = note_archived(context, claimed, actor)
        if finding is None:
            return tally
    marked = settle(context, claimed, finding, actor)
    if marked is not None:  # else it took longer than the lease: another process has it now
        tally.note(finding)
        tally.marked.update(marked)
    return tally


def backlog_of(session: Session, context: ServiceContext, due: Due, waited: timedelta = timedelta()) -> Backlog:
    """`waited`: how long after its last reading a copy comes due."""
    now = database_now(session)
    free = copy_is_free(now)
    count, leased, oldest = session.execute(
        select(
            func.count().filter(free),
            func.count().filter(~free),
            func.min(Copy.verified_at),
        ).where(or_(*(and_(Copy.store_id == each.store_id, due.condition(now, each)) for each in context.stores)))
    ).one()
    return Backlog(count, leased, None if oldest is None else oldest + waited)


def _claim_due(session: Session, context: ServiceContext, due: Due, attached: AttachedStore) -> list[Claim]:
    now = database_now(session)
    return claim_copies(
        session,
        Copy.store_id == attached.store_id,
        due.condition(now, attached),
        copy_is_free(now),
        seconds=context.settings.chunk_lease_seconds,
        most=BATCH,
        first=due.first,
    )


def _defer(context: ServiceContext, claims: Sequence[Claim]) -> None:
    with context.database.transaction() as session:
        until = database_now(session) + _AFTER_FAILURE
        for position, claimed in enumerate(claims):
            again_at = until if position == 0 else None
            lease.give_back(session, Copy, claimed.lease_token, Copy.id == claimed.copy_id, until=again_at)
