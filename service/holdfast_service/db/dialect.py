"""What SQLite and Postgres say differently: column types, the clock, and the insert of what may be there already."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    TypeDecorator,
    bindparam,
    column,
    exists,
    func,
    insert,
    select,
    text,
    type_coerce,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

if TYPE_CHECKING:
    from holdfast_service.db.tables.core import Table


@contextmanager
def unlimited(connection: Connection) -> Iterator[None]:
    """What the block does in the transaction that is open may take hours: Postgres's limits of time are off for it."""
    if connection.dialect.name != "postgresql":
        yield
        return
    from holdfast_service.db.postgres import LimitedConnection, without_limits

    with without_limits(cast("LimitedConnection", connection.connection.dbapi_connection)):
        yield


# SQLite gives row ids only to a column of exactly this type.
RowId = BigInteger().with_variant(Integer, "sqlite")
Document = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


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


class Hex(TypeDecorator[str]):
    """So many bytes, which the code writes as lower-case hex: a digest, or what is named by random bytes. The catalog
    keeps the bytes themselves, half of the text, and their order is that of the text.

    Binding refuses another length and anything but lower-case hex: it would be another name for the same bytes.
    """

    impl = LargeBinary
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        if value is None:
            return None
        with suppress(ValueError):
            data = bytes.fromhex(value)
            if len(data) == self.length and data.hex() == value:
                return data
        digits = 2 * self.length
        raise ValueError(f"{value[:80]!r} must not reach the catalog: it is not {digits} lower-case hex digits")

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> str | None:
        return None if value is None else bytes(value).hex()


# A SHA-256, as `holdfast_protocol.digests` makes it.
Digest = Hex(32)


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index of the rows for which `where` holds. A query that says exactly this can use it."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


def dialect_of(session: Session) -> str:
    """`sqlite` or `postgresql`."""
    return session.get_bind().dialect.name


class clock(FunctionElement[datetime]):  # noqa: N801  a SQL function, as func.now
    """The catalog's clock as a column: the database's time at this moment, in UTC. Leases and deadlines are compared
    with it, never with a client's time.

    On Postgres `clock_timestamp()`: after a wait for a lock `now()`, the transaction's start, is old (rule
    database-clock). On SQLite service and database are one process on one machine.
    """

    inherit_cache = True
    type = Moment()


@compiles(clock)
def _of_postgres(_element: clock, _compiler: SQLCompiler, **_more: Any) -> str:
    return "clock_timestamp()"


@compiles(clock, "sqlite")
def _of_python(_element: clock, compiler: SQLCompiler, **more: Any) -> str:
    return str(compiler.process(bindparam("clock", callable_=_python_now, type_=Moment()), **more))


def _python_now() -> datetime:
    return datetime.now(UTC)


_CLOCK = select(clock())


def database_now(session: Session, read: datetime | None = None) -> datetime:
    """The catalog's clock: `read`, if a statement has just read it as `clock`, or else in a statement of its own."""
    return _read_clock(session, read)


def _read_clock(session: Session, read: datetime | None) -> datetime:
    if read is not None:
        return read
    if dialect_of(session) == "sqlite":
        return _python_now()
    moment: datetime = session.execute(_CLOCK).scalar_one()
    return moment


def holds_text(session: Session, texts: Any, wanted: str) -> ColumnElement[bool]:
    """Whether a Document column, a list of texts, has this one."""
    if dialect_of(session) == "postgresql":
        return type_coerce(texts, JSONB).contains([wanted])
    each = func.json_each(texts).table_valued("value")
    return exists(select(1).select_from(each).where(column("value") == wanted))


def insert_absent(session: Session, table: type[Table], rows: Sequence[dict[str, Any]]) -> None:
    """`INSERT … ON CONFLICT DO NOTHING`, in the order given: one statement that waits for a concurrent insert instead
    of failing.

    The caller gives rows that others may insert too in sorted order, or two batches deadlock (rule sorted-inserts).
    What is there afterwards must be read in a LATER statement: this one's snapshot is older than the other's commit.
    """
    if not rows:
        return
    session.flush()  # the connection does not: what was added before may be what these rows refer to
    # The rows as parameters: a statement that holds them is compiled anew each time, which costs more than to run it.
    session.connection().execute(_unless_there(session, table), list(rows))


def insert_new(session: Session, table: type[Table], rows: Sequence[dict[str, Any]], *returned: Any) -> Sequence[Any]:
    """`insert_absent`, and the columns `returned` of each row that this transaction has inserted."""
    if not rows:
        return []
    session.flush()
    return session.connection().execute(_unless_there(session, table, *returned), list(rows)).all()


def insert_all(session: Session, table: type[Table], rows: Sequence[dict[str, Any]], *returned: Any) -> Sequence[Any]:
    """One statement for many rows that no other transaction inserts, and the columns `returned` of each, in any order.
    There must be one: else the database is sent a statement for each row."""
    if not rows:
        return []
    session.flush()
    return session.connection().execute(_inserted(table, _names(returned)), list(rows)).all()


def _unless_there(session: Session, table: type[Table], *returned: Any) -> Any:
    return _unless_there_on(dialect_of(session), table, _names(returned))


def _names(columns: Sequence[Any]) -> tuple[str, ...]:
    return tuple(column.key for column in columns)


# Kept: to put a statement together, and to see that it was compiled before, takes longer than to run it.


@functools.cache
def _unless_there_on(dialect: str, table: type[Table], returned: tuple[str, ...]) -> Any:
    insert_into: Any = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert_into(table).on_conflict_do_nothing()
    return statement.returning(*(getattr(table, name) for name in returned)) if returned else statement


@functools.cache
def _inserted(table: type[Table], returned: tuple[str, ...]) -> Any:
    return insert(table).returning(*(getattr(table, name) for name in returned))
