"""The order of the events: numbers, given after the events were committed.

Transactions commit in another order than they begin, so an event's row can become visible after one with a greater id,
and who reads on from the greatest id would miss it. Numbers are given in transactions of their own, one after the other
by a lock: who sees a number sees all smaller ones too, on both databases and through any number of services.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, exists, func, select, text, update
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.events import UNNUMBERED, EventNumbering, EventRow
from holdfast_service.errors import ProblemError

AT_ONCE = 1000
_NOT_NOW = (ProblemCode.CATALOG_READ_ONLY, ProblemCode.DATABASE_UNAVAILABLE, ProblemCode.BUSY)
_UNSYNCHRONIZED = {"synchronize_session": False}


def number_new(database: Database) -> int:
    """Gives numbers to the events that have none, and returns the greatest number. Costs one small question if there
    are none. A catalog that takes no writes now keeps them for later."""
    while True:
        with database.read(in_transaction=False) as session:
            last, more = session.execute(
                select(
                    select(func.coalesce(func.max(EventNumbering.last), 0)).scalar_subquery(),
                    exists().where(text(UNNUMBERED)).select_from(EventRow),
                )
            ).one()
        if not more:
            return int(last)
        try:
            last, count = database.run(_number_some)
        except ProblemError as problem:
            if problem.code not in _NOT_NOW:
                raise
            return int(last)
        if count < AT_ONCE:
            return last


def _number_some(session: Session) -> tuple[int, int]:
    """The greatest number, and how many were given. The order of their ids is kept: within a transaction it is that in
    which they happened."""
    last = _locked(session).last
    ids = session.scalars(select(EventRow.id).where(text(UNNUMBERED)).order_by(EventRow.id).limit(AT_ONCE)).all()
    if ids:
        numbers = [{"id": each, "number": number} for number, each in enumerate(ids, last + 1)]
        session.execute(update(EventRow), numbers)
        session.execute(update(EventNumbering).values(last=last + len(ids)), execution_options=_UNSYNCHRONIZED)
    return last + len(ids), len(ids)


def forget_some(session: Session, *, older_than: timedelta) -> int:
    """Deletes old events that have a number, the oldest first; how many. Who asks for what came after one of them is
    told that it is forgotten."""
    old = session.execute(
        select(EventRow.id, EventRow.number)
        .where(EventRow.happened_at < database_now(session) - older_than, EventRow.number.is_not(None))
        .order_by(EventRow.happened_at)
        .limit(AT_ONCE)
    ).all()
    if old:
        greatest = max(_locked(session).forgotten, *(number or 0 for _, number in old))
        session.execute(delete(EventRow).where(EventRow.id.in_([each for each, _ in old])))
        session.execute(update(EventNumbering).values(forgotten=greatest), execution_options=_UNSYNCHRONIZED)
    return len(old)


def unnumbered(session: Session) -> int:
    """How many events have no number yet, up to AT_ONCE."""
    some = select(EventRow.id).where(text(UNNUMBERED)).limit(AT_ONCE).subquery()
    return session.execute(select(func.count()).select_from(some)).scalar_one()


def _locked(session: Session) -> EventNumbering:
    """The one row, made when it is needed first."""
    row = select(EventNumbering).with_for_update()
    found = session.scalar(row)
    if found is None:
        last = session.execute(select(func.coalesce(func.max(EventRow.number), 0))).scalar_one()
        insert_absent(session, EventNumbering, [{"id": 1, "last": last, "forgotten": 0}])
        found = session.execute(row).scalar_one()
    return found


def known_numbers(session: Session) -> tuple[int, int]:
    """The greatest number whose event has gone, and the greatest one of all."""
    forgotten, last = func.max(EventNumbering.forgotten), func.max(EventNumbering.last)
    row = session.execute(select(func.coalesce(forgotten, 0), func.coalesce(last, 0))).one()
    return row[0], row[1]
