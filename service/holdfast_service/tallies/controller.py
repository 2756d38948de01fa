"""The controller `tally`: adds up what has changed, finds out what bytes are kept for, compares the sums with the rows,
a slice in each pass, and tells of the quotas that the sums have come near to. One process at a time does it, which
spares work: two at once are harmless."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import exists, func, or_, select
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.tallies import ByteDelta, CheckpointDelta, ListDelta, RecountMark
from holdfast_service.quotas.crossings import tell_crossings
from holdfast_service.settings import ServiceSettings
from holdfast_service.tallies.compare import KINDS, Compared, compare, resting_kinds
from holdfast_service.tallies.fold import fold
from holdfast_service.tallies.recount import Recounted, is_due, take_up_marks
from holdfast_service.work.report import MOST_COUNTED, Backlog, ControllerLoop, ReconcileReport

NAME = "tally"
_SLICES_TO_FILL = 20


@dataclass(frozen=True, kw_only=True)
class TallyReport(ReconcileReport):
    """`done`: changes that were taken up. `moved`: copies that are counted as something else now. `drifted` must be 0:
    sums that were not those of the rows, and are put right."""

    moved: int = 0
    filled: int = 0
    drifted: int = 0


def reconcile(context: ServiceContext, *, whole: bool = False) -> TallyReport:
    """`whole`: with a whole comparison, now."""
    if not whole and _nothing_to_do(context):
        return TallyReport(done=tell_crossings(context))  # runs are in no tally
    recounted, compared = Recounted(), Compared()
    done = fold(context)
    if take_up_marks(context, recounted):
        # What is marked would be compared for nothing.
        for _ in range(_SLICES_TO_FILL):
            before = compared.filled
            compare(context, compared, whole=whole)
            if compared.filled == before:
                break
    done += fold(context)
    return TallyReport(
        done=done + recounted.marks + tell_crossings(context),
        failed=compared.drifted,
        error=f"{compared.drifted} sums had drifted, and are put right. Report it." if compared.drifted else None,
        moved=recounted.copies,
        filled=compared.filled,
        drifted=compared.drifted,
    )


def _nothing_to_do(context: ServiceContext) -> bool:
    """Mostly so, and cheap to ask: a service that is idle should cost nothing."""
    with context.database.read() as session:
        now = database_now(session)
        deltas = or_(*(exists(select(table.id)) for table in (ByteDelta, CheckpointDelta, ListDelta)))
        marked = exists().where(is_due(now))
        return not session.scalar(select(or_(deltas, marked))) and resting_kinds(session, now) >= KINDS


def backlog(session: Session, _context: ServiceContext) -> Backlog:
    """Changes that wait to be taken up."""
    now = database_now(session)
    some = select(RecountMark.due_at).where(is_due(now)).order_by(RecountMark.due_at).limit(MOST_COUNTED).subquery()
    count, oldest = session.execute(select(func.count(), func.min(some.c.due_at))).one()
    return Backlog(due=int(count), oldest_due_at=oldest)


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop(NAME, settings.controller_interval_seconds, reconcile, backlog, sole=True),)
