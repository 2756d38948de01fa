"""Claims the copies that are due, reads them back and settles them, store by store: proving and scrubbing are this.

A copy is claimed with a lease, so any number of processes share the work, and a killed one's copies come due again. A
store that is away, or not this catalog's, proves nothing and stops only its own part of the round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog
from sqlalchemy import ColumnElement, TextClause, and_, func, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.archived import note_archived
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.reread import Claim, Finding, claim, is_free, read_back, settle
from holdfast_service.catalog.rounds import Backlog
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.scrub.tally import Tally, keep_totals
from holdfast_service.stores.base import ObjectArchived, StoreError

BATCH = 8
# A copy that the store could not give is not the first one again in the next round, or it would hold up the others.
_AFTER_FAILURE = timedelta(seconds=30)

_log = structlog.get_logger("holdfast.scrub")


@dataclass(frozen=True)
class Due:
    """Which copies of a store are due now, and which of them come first."""

    condition: Callable[[datetime, AttachedStore], ColumnElement[bool] | TextClause]
    first: InstrumentedAttribute[int] | InstrumentedAttribute[datetime | None]


@dataclass
class Reading:
    """What came of a round. `problems`: the store's role and why its part was stopped."""

    by_store: dict[int, Tally] = field(default_factory=dict)
    failed: int = 0
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def error(self) -> str | None:
        return "; ".join(f"{role} store: {why}" for role, why in self.problems.items()) or None


def read_due(context: ServiceContext, actor: Actor, due: Due, spend: Callable[[int], None]) -> Reading:
    """Reads for about one interval, or until nothing is due: a batch of each store in turn."""
    reading = Reading({attached.store_id: Tally() for attached in context.stores})
    ends_at = time.monotonic() + context.settings.controller_interval_seconds
    left = list(context.stores)
    try:
        while left:
            left = [attached for attached in left if _read_batch(context, actor, due, attached, reading, spend=spend)]
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
    spend: Callable[[int], None],
) -> bool:
    """Whether there may be more to read in this store."""
    claims = context.database.run(lambda session: _claim_due(session, context, due, attached))
    for position, claimed in enumerate(claims):
        try:
            tally = read_one(context, claimed, actor, spend)
        except StoreError as error:
            _put_off(context, claims[position:])
            reading.failed += 1
            reading.problems[attached.role.value] = str(error)
            _log.warning("store_not_read", store=attached.role.value, reason=str(error))
            return False
        reading.by_store[attached.store_id].add(tally)
    return len(claims) == BATCH


def read_one(context: ServiceContext, claimed: Claim, actor: Actor, spend: Callable[[int], None]) -> Tally:
    """Raises StoreError if the copy's store cannot tell; the lease is then still the caller's to give back."""
    tally = Tally()

    def on_bytes(count: int) -> None:
        tally.read_bytes += count
        spend(count)

    finding: Finding | None
    try:
        finding = read_back(context, claimed, on_bytes)
    except ObjectArchived:
        finding = note_archived(context, claimed, actor)
        if finding is None:
            return tally
    marked = settle(context, claimed, finding, actor)
    if marked is not None:  # else it took longer than the lease; somebody else has it now
        tally.note(finding)
        tally.marked.update(marked)
    return tally


def backlog_of(session: Session, context: ServiceContext, due: Due, waited: timedelta = timedelta()) -> Backlog:
    """`waited`: how long after its last reading a copy comes due."""
    now = database_now(session)
    free = is_free(now)
    count, leased, oldest = session.execute(
        select(
            func.count().filter(free),
            func.count().filter(~free),
            func.min(Copy.verified_at),
        ).where(or_(*(and_(Copy.store_id == each.store_id, due.condition(now, each)) for each in context.stores)))
    ).one()
    return Backlog(count, leased, None if oldest is None else oldest + waited)


def lease(context: ServiceContext) -> timedelta:
    """For how long a process that is killed in the middle holds a copy."""
    return timedelta(seconds=context.settings.chunk_lease_seconds)


def _claim_due(session: Session, context: ServiceContext, due: Due, attached: AttachedStore) -> list[Claim]:
    now = database_now(session)
    rows = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(Copy.store_id == attached.store_id, due.condition(now, attached), is_free(now))
        .order_by(due.first, Copy.id)
        .limit(BATCH)
        .with_for_update(of=Copy, skip_locked=True)
    ).all()
    return [claim(session, chunk, copy, now + lease(context), suspect=False) for copy, chunk in rows]


def _put_off(context: ServiceContext, claims: Sequence[Claim]) -> None:
    with context.database.transaction() as session:
        until = database_now(session) + _AFTER_FAILURE
        for position, claimed in enumerate(claims):
            session.execute(
                update(Copy)
                .where(Copy.id == claimed.copy_id, Copy.leased_until == claimed.leased_until)
                .values(leased_until=until if position == 0 else None)
            )
