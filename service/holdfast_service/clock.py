"""The catalog's clock. Leases and deadlines are compared with the database's time, never with a client's.

On Postgres `clock_timestamp()`: after a wait for a lock `now()`, the transaction's start, is old (protocol rule 31).
On SQLite service and database are one process on one machine.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.orm import Session


def database_now(session: Session) -> datetime:
    """The database's time at this moment, in UTC."""
    return _read_clock(session)


def _read_clock(session: Session) -> datetime:
    if session.get_bind().dialect.name == "postgresql":
        moment: datetime = session.execute(text("SELECT clock_timestamp()")).scalar_one()
        return moment.astimezone(UTC)
    return datetime.now(UTC)
