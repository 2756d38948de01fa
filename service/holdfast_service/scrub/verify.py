"""A pass of proving: reads the copies that only their client has hashed, and those that were left suspect
(rule reuse-only-hashed).

Afterwards a copy is `read`, and other attempts may rely on it; or it is bad, and the checkpoints that need it and have
no other are marked. Where a ticket could still overwrite the copy it is only `read_early`: what went wrong is known at
once, and it is read again when that time is over (rule no-ticket-reuse).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, or_, text
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, Proof
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.audit.record import Actor
from holdfast_service.context import ServiceContext
from holdfast_service.db.tables.core import COPY_TO_READ, Copy
from holdfast_service.scrub.read_copies import Due, backlog_of, read_due, total_of
from holdfast_service.work.report import Backlog, ReconcileReport


def _is_due(now: datetime, _attached: AttachedStore) -> ColumnElement[bool]:
    early = and_(Copy.state == CopyState.VERIFIED, Copy.proof == Proof.READ_EARLY)
    # The text of the partial index, so that it is used.
    return and_(text(f"({COPY_TO_READ})"), or_(~early, Copy.overwritable_until <= now))


_DUE = Due(_is_due, Copy.id)


@dataclass(frozen=True, kw_only=True)
class ProveReport(ReconcileReport):
    good: int = 0
    bad: int = 0
    read_bytes: int = 0
    corrupt_checkpoints: tuple[str, ...] = ()


def reconcile(context: ServiceContext) -> ProveReport:
    reading = read_due(context, Actor.controller("verify"), _DUE, context.read_rate_limit.acquire)
    total = total_of(reading.by_store)
    return ProveReport(
        done=total.settled,
        failed=reading.failed,
        error=reading.error,
        good=total.good,
        bad=total.bad + total.missing,
        read_bytes=total.read_bytes,
        corrupt_checkpoints=tuple(sorted(total.marked)),
    )


def backlog(session: Session, context: ServiceContext) -> Backlog:
    return backlog_of(session, context, _DUE)
