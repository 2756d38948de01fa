"""A lease on a row: one process works on it until a moment of the catalog's clock, and a random token says whose it is.

    mine = RetentionMark.run_id == run_id
    token = claim(session, RetentionMark, mine, seconds=30)        # None: another process has it
    renew(session, RetentionMark, token, mine, seconds=30)         # False: another process has taken it over
    give_back(session, RetentionMark, token, mine, looked_at=now)  # settles, if the lease is still this process's

A caller that has locked its rows FOR UPDATE claims them with `claim_locked`, finds its row again with `locked`, and
ends the lease with `end_locked`. Many rows can share a token.

A process that dies keeps its lease until that moment, and no longer. A row can also be free only from a moment on: then
`leased_until` says when, and there is no token. The clock is the database's, because those of the processes may differ
(rule database-clock).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Text, TextClause, literal, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, mapped_column

from holdfast_service.db.dialect import Moment, database_now

_UNSYNCHRONIZED = {"synchronize_session": False}


class Leased:
    """The columns of a table whose rows are leased."""

    leased_until: Mapped[datetime | None] = mapped_column(Moment)
    lease_token: Mapped[str | None] = mapped_column(Text)


_Row = TypeVar("_Row", bound=Leased)


# No lease and no pause between two tries is so long: what ends later was written by a clock that was ahead.
_LONGEST = timedelta(days=1)


def has_run_out(leased_until: InstrumentedAttribute[datetime | None], now: datetime) -> ColumnElement[bool]:
    """Nothing is promised of the row any more. `leased_until`: the column that says so. Of a copy it may be the end of
    its last ticket, which can be far off."""
    return or_(leased_until.is_(None), leased_until <= now)


def is_free(leased_until: InstrumentedAttribute[datetime | None], now: datetime) -> ColumnElement[bool]:
    """No process has the row now."""
    return or_(has_run_out(leased_until, now), leased_until > now + _LONGEST)


def is_taken(row: Leased, now: datetime) -> bool:
    """The opposite, of a row that was read. Pure."""
    return row.leased_until is not None and now < row.leased_until <= now + _LONGEST


def claim(
    session: Session, table: type[Leased], *where: ColumnElement[bool], seconds: float, **values: Any
) -> str | None:
    """The token of a new lease on the one row that `where` names; None if it is not there, or is not free.

    `values` are written with it.
    """
    now = database_now(session)
    token = _new_token()
    taken = session.scalar(
        update(table)
        .where(*where, is_free(table.leased_until, now))
        .values(leased_until=now + timedelta(seconds=seconds), lease_token=token, **values)
        .returning(table.lease_token),
        execution_options=_UNSYNCHRONIZED,
    )
    return token if taken is not None else None


def claim_locked(session: Session, *rows: Leased, seconds: float) -> str:
    """The same for rows that the caller has locked and found free, or takes over. They share the token."""
    token = _new_token()
    until = database_now(session) + timedelta(seconds=seconds)
    for row in rows:
        row.lease_token, row.leased_until = token, until
    return token


def renew(
    session: Session, table: type[Leased], token: str, *where: ColumnElement[bool], seconds: float, **values: Any
) -> bool:
    """Moves the lease's end away, and writes `values` with it. False, and nothing is written, if another process has
    the row by now."""
    until = database_now(session) + timedelta(seconds=seconds)
    return _write(session, table, token, where, {"leased_until": until} | values)


def give_back(
    session: Session,
    table: type[Leased],
    token: str,
    *where: ColumnElement[bool],
    until: datetime | None = None,
    **values: Any,
) -> bool:
    """Ends the lease, and writes `values` with it. False, and nothing is written, if another process has the row by
    now. `until`: the row is free from then on, not at once."""
    return _write(session, table, token, where, ended(until) | values)


def locked(session: Session, table: type[_Row], token: str, *where: ColumnElement[bool] | TextClause) -> _Row | None:
    """The row as it is now, locked FOR UPDATE. None if another process has it by now, or `where` does not hold."""
    return session.scalar(
        select(table).where(*where, table.lease_token == token).with_for_update(),
        execution_options={"populate_existing": True},
    )


def end_locked(row: Leased, until: datetime | None = None) -> None:
    """Ends the lease of a row that the caller has locked. `until`: it is free from then on."""
    row.leased_until, row.lease_token = until, None


def ended(until: datetime | None = None) -> dict[str, Any]:
    """The same as the values of an UPDATE that takes rows away from every process."""
    return {"leased_until": until, "lease_token": None}


def _write(
    session: Session, table: type[Leased], token: str, where: Sequence[ColumnElement[bool]], values: dict[str, Any]
) -> bool:
    """`where` names the row by its key, so that a large table is not searched for the token."""
    written = session.scalar(
        update(table).where(*where, table.lease_token == token).values(values).returning(literal(1)),
        execution_options=_UNSYNCHRONIZED,
    )
    return written is not None


def _new_token() -> str:
    return secrets.token_hex(16)
