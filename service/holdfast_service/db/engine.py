"""Engines and transactions: one session style for SQLite and Postgres; what their settings can lose; and what a process
remembers of acknowledged changes, by which it finds that the database went back.

Operations open their own transaction (`with database.transaction() as session:`) and the endpoint replies after the
block has committed. A FastAPI `yield` dependency would commit after the reply was sent (rule commit-before-reply).
"""

from __future__ import annotations

import os
import random
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import structlog
from sqlalchemy import (
    ColumnElement,
    Engine,
    create_engine,
    delete,
    event,
    func,
    insert,
    literal,
    make_url,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session, sessionmaker

from holdfast_protocol.problems import ProblemCode
from holdfast_service.db.dialect import database_now, dialect_of
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.records import HistoryMark
from holdfast_service.errors import ProblemError, WentBackError

Result = TypeVar("Result")

_log = structlog.get_logger("holdfast.database")

_KEPT_CONNECTIONS = 20
"""More are closed as soon as they are not needed."""
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse.", "9p", "lustre", "ceph", "glusterfs", "afs", "beegfs", "gpfs")
_RETRYABLE_SQLSTATES = {"40001", "40P01"}  # serialization failure, deadlock detected
_UNWRITABLE_SQLSTATES = {"25006", "53100"}  # read-only transaction (a standby), disk full
_UNWRITABLE_SQLITE = {"attempt to write a readonly database", "database or disk is full"}


class DatabaseConfigurationError(ValueError):
    """The database URL cannot be used. The message names HOLDFAST_DATABASE_URL and says what to do."""


class Database:
    """One engine. Thread-safe; sessions are not shared between threads. `connections`: to Postgres, at most.
    `reads_only`: the database itself refuses every write, and a SQLite file that is not there is not made."""

    def __init__(
        self, url: str, *, statement_seconds: float = 60.0, connections: int = 50, reads_only: bool = False
    ) -> None:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise DatabaseConfigurationError(
                f"HOLDFAST_DATABASE_URL names {parsed.get_backend_name()!r}; use sqlite:///path or postgresql://…"
            )
        self.url = parsed
        self.is_postgres = parsed.get_backend_name() == "postgresql"
        self._statement_seconds = statement_seconds
        self._connections = connections
        self._reads_only = reads_only
        self.engine = self._postgres() if self.is_postgres else self._sqlite()
        self.memory = Memory()
        self._sessions = sessionmaker(self.engine, expire_on_commit=False, info={INFO: self.memory})

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A write transaction: READ COMMITTED on Postgres, BEGIN IMMEDIATE on SQLite (rule sqlite-immediate).

        Commits when the block ends; a lost database is `database_unavailable`, which a client retries, and one that
        takes no writes now is `catalog_read_only`.
        """
        with self._problems(), self._noticing(), self._sessions.begin() as session:
            yield session

    @contextmanager
    def read(self, *, in_transaction: bool = True, snapshot: bool = False) -> Iterator[Session]:
        """A session that only reads; nothing is written at its end, and SQLite writers are not kept waiting. Without a
        transaction Postgres is spared two round trips, and rows that are fetched bit by bit cannot be read. With
        `snapshot` all statements see what the first one saw, as they do on SQLite."""
        options = {} if in_transaction or not self.is_postgres else {"isolation_level": "AUTOCOMMIT"}
        if snapshot and self.is_postgres:
            options = {"isolation_level": "REPEATABLE READ"}
        with self._problems(), self._noticing(), self._sessions() as session:
            session.connection(execution_options={"holdfast_read_only": True, **options})
            yield session
            # Closing ends the transaction; a rollback here would also empty the rows that the caller keeps.

    def run(self, work: Callable[[Session], Result], *, tries: int = 5) -> Result:
        """Run `work` in a transaction, again after a deadlock or a serialization failure. `work` must be repeatable."""
        for remaining in range(tries - 1, -1, -1):
            try:
                with self._noticing(), self._sessions.begin() as session:
                    return work(session)
            except DBAPIError as error:
                if _sqlstate(error) not in _RETRYABLE_SQLSTATES or not remaining:
                    _raise_problem(error)
                    raise
                time.sleep(random.uniform(0.005, 0.05))  # noqa: S311
            except PoolTimeoutError:
                raise _busy() from None
            except (DataError, OverflowError):
                raise _not_keepable() from None
        raise AssertionError("unreachable")

    def note_went_back(self, lost: Sequence[str]) -> None:
        """For all processes, until an operator has accepted it. What was noted first stays."""
        _log.error("database_went_back", lost=lost)
        noted = (
            update(CatalogIdentity)
            .where(CatalogIdentity.went_back.is_(None))
            .values(
                went_back="; ".join(lost) or "nothing that this process can name", went_back_epoch=CatalogIdentity.epoch
            )
        )
        with self._sessions.begin() as session:
            session.execute(noted, execution_options={"synchronize_session": False})

    def dispose(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Around a transaction: that it found the database gone back outlives its rollback."""
        try:
            yield
        except WentBackError as error:
            if not error.noticed:
                with suppress(DBAPIError):  # who asks next finds it again
                    self.note_went_back(error.lost)
                    error.noticed = True
            raise

    @contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except PoolTimeoutError:
            raise _busy() from None
        except (DataError, OverflowError):
            raise _not_keepable() from None
        except DBAPIError as error:
            _raise_problem(error)
            raise

    def _postgres(self) -> Engine:
        from holdfast_service.db import postgres as postgres_limits  # psycopg takes 0.1 s, and SQLite never needs it

        # An error with a statement's values would bring secrets of webhooks into the log, and what jobs tell.
        engine = create_engine(
            self.url,
            isolation_level="READ COMMITTED",
            pool_size=min(self._connections, _KEPT_CONNECTIONS),
            max_overflow=max(self._connections - _KEPT_CONNECTIONS, 0),
            pool_timeout=20,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args=postgres_limits.CONNECT_ARGUMENTS,
        )
        ping = engine.dialect.do_ping

        @event.listens_for(engine, "do_connect")
        def _connect(_dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
            connection = postgres_limits.connect(self._statement_seconds, *arguments, **options)
            if self._reads_only:  # else the database's own default counts
                connection.read_only = True
            return connection

        @event.listens_for(engine, "begin")
        def _begin(connection: Any) -> None:
            raw = connection.connection.dbapi_connection
            if raw.pooled and not raw.autocommit:
                connection.exec_driver_sql(postgres_limits.limits(self._statement_seconds, "true"))

        def do_ping(connection: Any) -> bool:
            if connection.answered_just_now():
                return True
            with postgres_limits.brief_ping(connection):
                return ping(connection)

        engine.dialect.do_ping = do_ping  # type: ignore[method-assign, assignment]
        return engine

    def _sqlite(self) -> Engine:
        url = self.url
        if self.url.database not in (None, "", ":memory:"):
            path = Path(str(self.url.database))
            _refuse_network_filesystem(path)
            if not self._reads_only:
                _for_the_owner_alone(path)
            elif not path.is_file():
                raise DatabaseConfigurationError(f"there is no file {path}")
            else:
                url = url.set(database=f"file:{quote(str(path.absolute()))}", query={"mode": "ro", "uri": "true"})
        engine = create_engine(
            url, connect_args={"timeout": 30, "check_same_thread": False}, pool_size=20, hide_parameters=True
        )

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, _record: Any) -> None:
            connection.isolation_level = None  # pysqlite must not begin by itself; _begin does
            if self._reads_only:
                return  # to set the journal's mode would write
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin(connection: Any) -> None:
            read_only = connection.get_execution_options().get("holdfast_read_only", False)
            connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

        return engine


@contextmanager
def if_writable(what: str) -> Iterator[None]:
    """Around a write that a reader can do without: where the catalog takes none now, only the log says so."""
    try:
        yield
    except ProblemError as error:
        if error.code is not ProblemCode.CATALOG_READ_ONLY:
            raise
        _log.warning("catalog_takes_no_writes", left_out=what)


def _raise_problem(error: DBAPIError) -> None:
    """Raises ProblemError for what a caller can act upon. Anything else is a bug, and stays what it is."""
    # Only the first line: the rest repeats the statement and its values.
    reason = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
    if _sqlstate(error) in _UNWRITABLE_SQLSTATES or reason in _UNWRITABLE_SQLITE:
        raise ProblemError(
            ProblemCode.CATALOG_READ_ONLY,
            f"The database takes no writes now ({reason}). What is committed can still be read and pulled; saves and "
            "new attempts wait until an operator frees its disk, or promotes the standby.",
        ) from error
    if isinstance(error, OperationalError) or error.connection_invalidated:
        raise ProblemError(
            ProblemCode.DATABASE_UNAVAILABLE, f"The database did not answer ({reason}). Try again."
        ) from error


def _sqlstate(error: DBAPIError) -> str | None:
    found: str | None = getattr(error.orig, "sqlstate", None)
    return found


def _not_keepable() -> ProblemError:
    """A number beyond 64 bits, or NUL in a name: what a caller sent, and nothing that a row could be found by."""
    return ProblemError(
        ProblemCode.INVALID_REQUEST, "The request holds a number or a text that no database can keep. Correct it."
    )


def _busy() -> ProblemError:
    return ProblemError(ProblemCode.BUSY, "Every database connection of the service is in use. Try again in a second.")


def _for_the_owner_alone(path: Path) -> None:
    """The catalog holds the service's keys; what SQLite puts beside it gets the same mode. Another owner's is left."""
    with suppress(OSError):  # SQLite says better what is wrong with a path
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)


def _refuse_network_filesystem(path: Path) -> None:
    """WAL needs shared memory that network filesystems do not give: two hosts would corrupt the catalog."""
    kind = filesystem_kind(path)
    if kind.startswith(_NETWORK_FILESYSTEMS):
        raise DatabaseConfigurationError(
            f"HOLDFAST_DATABASE_URL points to a {kind} filesystem, where SQLite is not safe; "
            "put it on a local disk or use Postgres"
        )


def filesystem_kind(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The filesystem type that holds `path` ("ext4", "nfs4", …); "" where the system does not tell."""
    if not mounts.exists():
        return ""
    resolved = os.path.realpath(path)
    best, kind = "", ""
    for line in mounts.read_text(errors="replace").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount_point = fields[1].replace("\\040", " ")
        inside = resolved == mount_point or resolved.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, fields[2]
    return kind


# Where the database's settings can lose a commit that it has acknowledged: said at the start and by /readyz.
#
# Nothing is refused: a failover that has lost something is noticed all the same (below), and then costs an
# operator's time and the checkpoints of the last moments.

_SETTINGS = text(
    "SELECT name, setting FROM pg_settings WHERE name IN "
    "('fsync', 'full_page_writes', 'data_sync_retry', 'synchronous_commit', 'synchronous_standby_names')"
)
# How many there are is told to everybody; who they are is not.
_REPLICAS = text("SELECT count(*) FROM pg_stat_replication")


def what_can_be_lost(database: Database) -> list[str]:
    """A sentence for each setting, with what to set. Empty on SQLite, which writes through. Raises ProblemError."""
    if not database.is_postgres:
        return []
    with database.read() as session:
        settings = {row.name: row.setting for row in session.execute(_SETTINGS)}
        replicas = session.execute(_REPLICAS).scalar_one()
    return lossy_settings(settings, replicas)


def lossy_settings(settings: dict[str, str], replicas: int) -> list[str]:
    """Pure."""
    told = []
    if settings.get("fsync") == "off":
        told.append("fsync is off: a crash of its machine can lose acknowledged commits and damage the database.")
    if settings.get("full_page_writes") == "off":
        told.append("full_page_writes is off: a crash of its machine can damage the database.")
    if settings.get("data_sync_retry") == "on":
        told.append("data_sync_retry is on: Postgres goes on after the disk has refused commits. Set it to off.")
    commit = settings.get("synchronous_commit")
    if commit == "off":
        told.append("synchronous_commit is off: a crash of Postgres loses the last acknowledged commits. Set it to on.")
    elif replicas and (commit == "local" or not settings.get("synchronous_standby_names")):
        told.append(
            "It has a replica that no commit waits for: a failover to it loses the last acknowledged commits. Name it "
            "in synchronous_standby_names, with synchronous_commit on."
        )
    return told


# What one process remembers of the changes that the database acknowledged to it (rule database-went-back).
#
# A database that fails over to an older copy of itself forgets such changes and says nothing. So each change that
# people and jobs are told of moves a mark in its own transaction, and the process keeps the mark's number in memory. A
# database whose mark is behind that number has lost an acknowledged change. Postgres replays its log in order: where
# the newest mark is there, everything before it is there.
#
# A transaction has a mark (a slot) to itself while it is under way, so no row is hot. Slots are used again: a process
# has as many as it had transactions at once.

INFO = "holdfast_memory"
"""Under this name a session's `info` holds the memory of its process."""
_PENDING = "holdfast_pending_mark"
_NAMED = 50
_FORGOTTEN_AFTER = timedelta(days=30)
"""A process that lives moves a mark several times a day."""
_KEPT_WITHIN = timedelta(days=1)
"""So long after its change the copy beside the data may come: a store may be unavailable for some time."""


@dataclass(frozen=True)
class Snapshot:
    """`marks`: the acknowledged number of each slot. `changes`: the newest acknowledged ones, as (slot, number, what
    it was). `newest_at`: by the database's clock, when the newest mark was moved, or up to a day later."""

    memory_id: str
    marks: Mapping[int, int]
    changes: tuple[tuple[int, int, str], ...]
    newest_at: datetime | None

    def lost(self, session: Session) -> list[str] | None:
        """What the database has lost, in words, as far as it is known; None if it has lost nothing, or may have
        forgotten all of these marks because they are old. The snapshot must be older than what the session sees."""
        if not self.marks:
            return None
        rows = session.execute(
            select(HistoryMark.slot, HistoryMark.number).where(HistoryMark.memory_id == self.memory_id)
        )
        there = {row.slot: row.number for row in rows}
        if all(there.get(slot, 0) >= number for slot, number in self.marks.items()):
            return None
        if not there and self.newest_at is not None and _has_forgotten(session, self.newest_at):
            return None
        return [what for slot, number, what in self.changes if there.get(slot, 0) < number]


@dataclass
class _Pending:
    """The mark of one transaction that is under way."""

    slot: int
    number: int
    moved_at: datetime
    what: list[str] = field(default_factory=list)
    is_over: bool = False


class Memory:
    """One per opened database. Thread-safe."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.changed = threading.Event()
        """Set by each acknowledged change; the keeper of the copy beside the data clears it."""
        self.proven_on: str | None = None
        """The server that was seen to have all of it."""
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._issued: dict[int, int] = {}
        self._acknowledged: dict[int, int] = {}
        self._newest_at: datetime | None = None
        self._changes: deque[tuple[int, int, str]] = deque(maxlen=_NAMED)

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(self.id, dict(self._acknowledged), tuple(self._changes), self._newest_at)

    def note(self, session: Session, what: str) -> None:
        """`what` counts as acknowledged once the session has committed. Raises WentBackError where the database has
        forgotten this slot's last change. One that is known to have gone back is not remembered: its original may come
        back, and would lack what people did meanwhile."""
        pending: _Pending | None = session.info.get(_PENDING)
        if pending is None:
            if session.scalar(select(CatalogIdentity.went_back)) is not None:
                return
            pending = self._take(session)
            session.info[_PENDING] = pending
            event.listen(session, "after_commit", lambda _: self._end(pending, acknowledged=True), once=True)
            event.listen(session, "after_rollback", lambda _: self._end(pending, acknowledged=False), once=True)
        pending.what.append(what)

    def _take(self, session: Session) -> _Pending:
        with self._lock:
            slot = self._free.pop() if self._free else len(self._issued) + 1
            # Never issued twice: whether a commit whose reply was lost took place is not known.
            number = self._issued[slot] = self._issued.get(slot, 0) + 1
            acknowledged = self._acknowledged.get(slot, 0)
        try:
            moved_at = database_now(session)
            if not _move(session, self.id, slot, number, acknowledged, moved_at=moved_at):
                if (lost := self.snapshot().lost(session)) is not None:
                    # The slot stays out of use, and its number in memory: it is the proof.
                    raise WentBackError(lost)
                with self._lock:
                    self._acknowledged.clear()
                _move(session, self.id, slot, number, 0, moved_at=moved_at)
        except DBAPIError:  # the transaction is over, and the next one has the slot
            with self._lock:
                self._free.append(slot)
            raise
        return _Pending(slot, number, moved_at)

    def _end(self, pending: _Pending, *, acknowledged: bool) -> None:
        with self._lock:
            if pending.is_over:
                return
            pending.is_over = True
            self._free.append(pending.slot)
            if acknowledged:
                self._acknowledged[pending.slot] = pending.number
                self._newest_at = pending.moved_at
                self._changes.extend((pending.slot, pending.number, what) for what in pending.what)
        if acknowledged:
            self.changed.set()


def note_change(session: Session, what: str) -> None:
    """To be called in the transaction of each change that a caller is told of. `what` is for operators. Raises
    WentBackError."""
    memory: Memory = session.info[INFO]
    memory.note(session, what)


def forget_long_gone(session: Session) -> None:
    """Takes away the marks of processes that moved none for a month before the newest mark of all. Not before now: by a
    clock that was just put forward every process that lives is as old. Once a process has started and left a mark while
    the clock is ahead, the next one forgets these all the same: so the catalog notes until when marks were
    forgotten."""
    newest = _newest_mark(session)
    if newest is None:
        return
    gone = (
        select(HistoryMark.memory_id)
        .group_by(HistoryMark.memory_id)
        .having(func.max(HistoryMark.moved_at) < newest - _FORGOTTEN_AFTER)
    )
    forgotten = session.scalars(
        delete(HistoryMark).where(HistoryMark.memory_id.in_(gone)).returning(HistoryMark.moved_at),
        execution_options={"synchronize_session": False},
    ).all()
    if forgotten:
        noted = CatalogIdentity.marks_forgotten_until
        session.execute(
            update(CatalogIdentity)
            .where(or_(noted.is_(None), noted < max(forgotten)))
            .values(marks_forgotten_until=max(forgotten)),
            execution_options={"synchronize_session": False},
        )


def _has_forgotten(session: Session, newest_at: datetime) -> bool:
    """Whether it may be so with the marks of a process whose newest was moved then. A database that went back to a
    moment before they were taken away has no note of it. Versions before 0038 left none; but the process that takes
    marks away moves one of its own in the same transaction, about a month later at the earliest. Nothing is added to
    `newest_at`: what lies beside the data may name the last moment that there is."""
    noted = session.scalar(select(CatalogIdentity.marks_forgotten_until))
    if noted is not None and noted + _KEPT_WITHIN >= newest_at:
        return True
    newest = _newest_mark(session)
    return newest is not None and newest - _FORGOTTEN_AFTER + _KEPT_WITHIN >= newest_at


def _newest_mark(session: Session) -> datetime | None:
    """When it was moved. What is dated later than now a clock has written that was ahead."""
    dated = HistoryMark.moved_at <= database_now(session)
    return session.scalar(select(func.max(HistoryMark.moved_at)).where(dated))


def _move(session: Session, memory_id: str, slot: int, number: int, acknowledged: int, *, moved_at: datetime) -> bool:
    """Whether the database still has the slot's acknowledged number; the mark stands at `number` then."""
    moved = session.scalar(
        update(HistoryMark)
        .where(HistoryMark.memory_id == memory_id, HistoryMark.slot == slot, HistoryMark.number >= acknowledged)
        .values(number=number, moved_at=moved_at)
        .returning(HistoryMark.number),
        execution_options={"synchronize_session": False},
    )
    if moved is None and not acknowledged:
        session.execute(insert(HistoryMark).values(memory_id=memory_id, slot=slot, number=number, moved_at=moved_at))
        return True
    return moved is not None


# Whether the database went back to an older state under a service that runs (rule database-went-back).
#
# Each process asks its own memory (`Memory`), and what others have left beside the data (`records/history.py`). What
# one of them finds stands in the catalog's identity, so that all of them refuse: writes of training jobs, the choice of
# a restore point, and deletions. It stays until an operator has compared the catalog with its stores and accepted what
# is lost (`attached_stores/epoch.py`). People can read meanwhile.


def refuse_if_went_back(session: Session) -> None:
    """In a transaction that writes for a training job. Raises WentBackError."""
    known = history_known(session)
    refuse_gone_back(session, known, *session.execute(select(*history_columns(dialect_of(session)))).one())


def history_known(session: Session) -> Snapshot:
    """What this process remembers. Taken before the statement that reads `history_columns`."""
    memory: Memory = session.info[INFO]
    return memory.snapshot()


def history_columns(dialect: str) -> tuple[ColumnElement[str | None], ColumnElement[str]]:
    """Of `catalog_identity`, for `refuse_gone_back`: what a process has found lost, and which server answers. That is
    another one after each failover, and after each restart of the same."""
    started_at = func.concat(func.pg_postmaster_start_time(), "")
    return CatalogIdentity.went_back.expression, started_at if dialect == "postgresql" else literal("sqlite")


def refuse_gone_back(session: Session, known: Snapshot, found: str | None, server: str, *, again: bool = False) -> None:
    """Raises WentBackError. `again`: also a server that was seen to have all of it is asked."""
    if found is not None:
        raise WentBackError([found], noticed=True)
    memory: Memory = session.info[INFO]
    if again or server != memory.proven_on:
        lost = known.lost(session)
        if lost is not None:
            raise WentBackError(lost)
        memory.proven_on = server


def prove_history(database: Database) -> str:
    """Outside of any transaction, before something is chosen or deleted: the server that has all that this process
    remembers. Raises WentBackError."""
    known = database.memory.snapshot()  # before the session sees anything
    with database.read(in_transaction=False) as session:
        found, server = session.execute(select(*history_columns(dialect_of(session)))).one()
        refuse_gone_back(session, known, found, server, again=True)
    return server
