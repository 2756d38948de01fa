"""A pass of scrubbing: reads and hashes again what was proven long ago, the longest unread first.

Every copy is read once in HOLDFAST_SCRUB_DAYS, at HOLDFAST_SCRUB_BYTES_PER_SECOND at most, and within what the process
reads back at all. A copy comes due a little before its time, by up to a fifth and by its number: what was written in
one burst does not come due in one burst, and each day has its share.

Copies that must be thawed first are left out. Copies in the cold store are read like the rest: no reader checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.audit.record import Actor
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import PROVEN
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Copy
from holdfast_service.scrub import repair, verify
from holdfast_service.scrub.read_copies import Due, backlog_of, read_due, total_of
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.read_rate_limit import ReadRateLimit
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

_SLOTS = 8
_EARLIEST = 0.2


@dataclass(frozen=True, kw_only=True)
class ScrubReport(ReconcileReport):
    good: int = 0
    bad: int = 0
    missing: int = 0
    read_bytes: int = 0
    corrupt_checkpoints: tuple[str, ...] = ()


def reconcile(context: ServiceContext) -> ScrubReport:
    if not context.settings.scrub_days:
        return ScrubReport()
    own = ReadRateLimit(context.settings.scrub_bytes_per_second)

    def acquire(count: int) -> None:
        own.acquire(count)
        context.read_rate_limit.acquire(count)

    reading = read_due(context, Actor.controller("scrub"), _due(context), acquire)
    total = total_of(reading.by_store)
    return ScrubReport(
        done=total.settled,
        failed=reading.failed,
        error=reading.error,
        good=total.good,
        bad=total.bad,
        missing=total.missing,
        read_bytes=total.read_bytes,
        corrupt_checkpoints=tuple(sorted(total.marked)),
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    if not context.settings.scrub_days:
        return Backlog(0)
    return backlog_of(session, context, _due(context), timedelta(days=context.settings.scrub_days))


def oldest_seconds(session: Session, context: ServiceContext) -> dict[int, float]:
    """By store id: how long ago the copy was read, or proven by its upload, that has waited the longest."""
    now = database_now(session)
    found: dict[int, float] = {}
    # One by one: each then reads the end of an index, and does not walk through all of it.
    for attached in context.stores:
        oldest = session.scalar(
            select(func.min(Copy.verified_at)).where(
                Copy.store_id == attached.store_id, Copy.state == _settled(attached), Copy.storage_class.is_(None)
            )
        )
        if oldest is not None:
            found[attached.store_id] = max(0.0, (now - oldest).total_seconds())
    return found


def _due(context: ServiceContext) -> Due:
    whole = timedelta(days=context.settings.scrub_days)

    def condition(now: datetime, attached: AttachedStore) -> ColumnElement[bool]:
        slots = [
            and_(Copy.id % _SLOTS == slot, Copy.verified_at <= now - whole * (1 - _EARLIEST * slot / (_SLOTS - 1)))
            for slot in range(_SLOTS)
        ]
        return and_(
            Copy.state == _settled(attached),
            Copy.proof.in_(PROVEN),
            # In a class for what is seldom read, reading costs more than a month of storing: only a person asks for it.
            Copy.storage_class.is_(None),
            Copy.verified_at <= now - whole * (1 - _EARLIEST),  # what the index can be asked
            or_(*slots),
        )

    return Due(condition, Copy.verified_at)


def _settled(attached: AttachedStore) -> CopyState:
    """What a good copy there is, if it can be read at once."""
    return CopyState.COLD if attached.role is StoreRole.COLD else CopyState.VERIFIED


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    interval = settings.controller_interval_seconds
    return (
        ControllerLoop("verify", interval, verify.reconcile, verify.backlog),
        ControllerLoop("scrub", interval, reconcile, backlog),
        ControllerLoop("repair", interval * repair.EVERY_ROUNDS, repair.reconcile, repair.backlog),
    )
