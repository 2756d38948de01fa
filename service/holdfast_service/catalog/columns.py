"""Column types and indexes that mean the same on SQLite and on Postgres."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Index, Integer, TypeDecorator, text
from sqlalchemy.dialects.postgresql import JSONB

# SQLite gives row ids only to a column of exactly this type.
RowId = BigInteger().with_variant(Integer, "sqlite")
Document = JSON().with_variant(JSONB, "postgresql")


class Moment(TypeDecorator[datetime]):
    """A point in time in UTC. SQLite forgets the zone, so it is put back; a naive time is refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone must not reach the catalog")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Of the rows for which `where` holds. A query that says exactly this can use it."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))
