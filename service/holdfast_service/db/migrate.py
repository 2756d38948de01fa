"""Brings the catalog's tables up to date; the first thing that a starting service does with its database.

The revisions lie in `migrations/`: at the root of a checkout, inside the package in a wheel. All of an upgrade is one
transaction under a lock, so two services that start at once are fine: the second finds nothing left to do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from holdfast_protocol.problems import ProblemCode
from holdfast_service.db.engine import Database
from holdfast_service.errors import ProblemError

# "holdfast" as a number: what the services of one Postgres database wait for while one of them migrates.
_ADVISORY_LOCK = 0x686F6C64


class CatalogTooNewError(RuntimeError):
    """The catalog was written by a newer Holdfast. Install that version, or restore an older catalog."""


def upgrade(database: Database) -> None:
    """To the newest revision that this version knows. Raises CatalogTooNewError and `database_unavailable`."""
    try:
        # Most starts have nothing to do: they take no lock, and SQLite checks no reference.
        with database.read() as session:
            if pending_revision(session.connection()) is None:
                return
        with exclusive_connection(database) as connection:
            current, newest = revisions(connection)
            if current == newest:
                return
            if current is not None and current not in {script.revision for script in _scripts().walk_revisions()}:
                raise CatalogTooNewError(
                    f"The catalog is at revision {current}, which this version of Holdfast does not know. "
                    "Install the version that wrote it, or set HOLDFAST_DATABASE_URL to another catalog."
                )
            command.upgrade(alembic_config(connection), "head")
    except DBAPIError as error:
        raise ProblemError(
            ProblemCode.DATABASE_UNAVAILABLE, "The database does not let its tables be brought up to date."
        ) from error


def revisions(connection: Connection) -> tuple[str | None, str | None]:
    """The revision of the catalog, None if there is none, and the newest that this version knows."""
    return MigrationContext.configure(connection).get_current_revision(), _newest_revision()


def pending_revision(connection: Connection) -> str | None:
    """The revision that the catalog lacks, or None if it is up to date."""
    found, known = revisions(connection)
    return None if found == known else known


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(alembic_config())


@functools.cache
def _newest_revision() -> str | None:
    return _scripts().get_current_head()


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def migrations_folder() -> Path:
    package = Path(__file__).parents[1]
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parents[1] / "migrations"


@contextmanager
def exclusive_connection(database: Database) -> Iterator[Connection]:
    """One transaction that excludes every other migration: an advisory lock on Postgres, BEGIN IMMEDIATE on SQLite."""
    with database.engine.connect() as connection:
        if database.is_postgres:
            with connection.begin():
                from holdfast_service.db.postgres import LimitedConnection, without_limits

                with without_limits(cast("LimitedConnection", connection.connection.dbapi_connection)):
                    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
                    yield connection
            return
        # SQLite alters a table by dropping its old form, which foreign keys would take for a deletion of all its rows.
        # Below SQLAlchemy, which would begin a transaction: within one the setting cannot be changed.
        raw = connection.connection.dbapi_connection
        assert raw is not None
        raw.execute("PRAGMA foreign_keys=OFF")
        try:
            with connection.begin():
                yield connection
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
                if broken is not None:
                    raise RuntimeError(f"the upgrade would leave a broken reference in the table {broken[0]}")
        finally:
            raw.execute("PRAGMA foreign_keys=ON")
