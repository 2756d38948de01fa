"""Fresh catalogs for tests: migrated once, then copied for each test (a file on SQLite, a template on Postgres).

Each test has an engine of its own, and the statements of all of them are compiled once (`statements_compiled_once`).
"""

from __future__ import annotations

import atexit
import functools
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.engine.default import DefaultDialect

from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import upgrade
from holdfast_service.db.tables import Table
from tests.support.postgres import PostgresServer


@contextmanager
def statements_compiled_once() -> Iterator[None]:
    """SQLAlchemy keeps what it has compiled for each engine, by the engine's dialect; to compile anew for the engine of
    each test takes a third of the time of the service's tests. Here all engines share it: two dialects of one kind are
    equal, as all of them speak with databases of one version."""
    compiled: dict[Any, Any] = {}

    def share(connection: Connection) -> None:
        connection.execution_options(compiled_cache=compiled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultDialect, "__eq__", lambda self, other: type(self) is type(other))
        patch.setattr(DefaultDialect, "__hash__", lambda self: hash(type(self)))
        event.listen(Engine, "engine_connect", share)
        yield
        event.remove(Engine, "engine_connect", share)


def migrate(url: str) -> None:
    database = Database(url)
    try:
        upgrade(database)
    finally:
        database.dispose()


@functools.cache
def migrated_file() -> Path:
    """A catalog for services to begin with: to migrate one takes a third of the start of a forked one."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-catalog-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    migrate(f"sqlite:///{folder / 'catalog.db'}")
    return folder / "catalog.db"


class SqliteCatalogs:
    """Copies of one migrated file."""

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template.db"
        migrate(f"sqlite:///{self._template}")

    def new(self, folder: Path) -> str:
        path = folder / f"catalog-{secrets.token_hex(4)}.db"
        shutil.copy(self._template, path)
        return f"sqlite:///{path}"


class PostgresCatalogs:
    """Clones of one migrated database. What a test gave back is emptied and used again: making and dropping one costs
    ten times as much."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._template = f"holdfast_template_{secrets.token_hex(4)}"
        migrate(server.create_database(self._template))
        self._made = [self._template]
        self._free: list[str] = []

    def new(self) -> str:
        """Migrated and empty; nobody else's until it is given back."""
        if self._free:
            url = self._free.pop()
            _empty(url)
            return url
        name = f"holdfast_{secrets.token_hex(6)}"
        self._made.append(name)
        return self._server.create_database(name, template=self._template)

    def give_back(self, url: str) -> None:
        self._free.append(url)

    def drop(self) -> None:
        for name in reversed(self._made):
            self._server.drop_database(name)


def _empty(url: str) -> None:
    """Ends what a test has left connected, a transaction that holds locks among it, and removes every row."""
    tables = ", ".join(table.name for table in Table.metadata.sorted_tables)
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
        # Without triggers: the one that keeps audit events append-only would refuse.
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        connection.execute(text(f"TRUNCATE {tables} RESTART IDENTITY"))
