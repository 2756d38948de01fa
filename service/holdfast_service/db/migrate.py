"""Brings the catalog's tables up to date: at a service's start, or by `holdfast admin migrate`.

The revisions lie in `migrations/`: at the root of a checkout, inside the package in a wheel. Two that migrate at once
are one: the second waits for a lock and finds nothing left to do.

A new catalog, and any on SQLite, is migrated in one transaction. On Postgres services save meanwhile: each revision is
a transaction of its own, and none waits for a table's lock longer than `LOCK_SECONDS`, because whatever comes behind a
lock that waits has to wait too. It gives up its turn, and tries again (docs/adr/0076).
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError

from holdfast_protocol.problems import ProblemCode
from holdfast_service.db.engine import Database
from holdfast_service.db.triggers import triggers_differ
from holdfast_service.errors import ProblemError

_log = structlog.get_logger("holdfast.migrations")

# "holdfast" as a number: what the services of one Postgres database wait for while one of them migrates.
_ADVISORY_LOCK = 0x686F6C64
LOCK_SECONDS = 0.25
"""A save waits at most so long behind a revision that waits for a table. It is well below Postgres' `deadlock_timeout`
(1 s): where both hold what the other one waits for, the revision gives up, and not the save."""
WAIT_SECONDS = 600.0
_PAUSE_SECONDS = (0.5, 2.0)
"""Between two tries: what has waited behind the first one has its turn."""
_ASKED_EVERY_SECONDS = 0.1
_RETRIED_SQLSTATES = {"55P03", "40P01"}  # lock not available (lock_timeout), deadlock detected


class CatalogTooNewError(RuntimeError):
    """The catalog was migrated by a newer Holdfast that this version cannot work with."""


class CatalogTooOldError(RuntimeError):
    """The catalog lacks revisions, and the settings leave them to `holdfast admin migrate`."""


class MigrationBlockedError(RuntimeError):
    """Another transaction kept a lock on a table for as long as the migration could wait. What was applied stays."""


@dataclass(frozen=True)
class Step:
    """A revision that the catalog lacks, and the first line of what it says of itself."""

    revision: str
    title: str


def upgrade(database: Database, *, wait_seconds: float = WAIT_SECONDS) -> list[Step]:
    """To the newest revision that this version knows; the revisions that were applied. Nothing is done to a newer
    catalog that this version can work with.

    Raises CatalogTooNewError, MigrationBlockedError after `wait_seconds` of tries, and `database_unavailable`.
    """
    try:
        # Most starts have nothing to do: they take no lock, and SQLite checks no reference.
        with database.read() as session:
            if not _missing(session.connection()) and not _cut_off(session.connection()):
                return []
        with exclusive_connection(database) as connection:
            if not database.is_postgres:
                steps, is_new = _missing(connection), True
            else:  # by another connection: this one must have no snapshot
                with database.read() as session:
                    asked = session.connection()
                    steps, is_new = _missing(asked), revisions(asked)[0] is None
                    if not steps and not _cut_off(asked):
                        return []
            if is_new and steps:
                command.upgrade(alembic_config(connection), "head")
            elif not is_new:
                _upgrade_beside_saves(database, wait_seconds)
            return steps
    except DBAPIError as error:
        raise ProblemError(
            ProblemCode.DATABASE_UNAVAILABLE, "The database does not let its tables be brought up to date."
        ) from error


def pending_steps(database: Database) -> list[Step]:
    """The revisions that the catalog lacks, in their order. Raises CatalogTooNewError and `database_unavailable`."""
    with database.read() as session:
        return _missing(session.connection())


def check_up_to_date(database: Database) -> None:
    """For a service that does not migrate. Raises CatalogTooOldError, CatalogTooNewError and `database_unavailable`."""
    steps = pending_steps(database)
    if steps:
        raise CatalogTooOldError(
            f"The catalog lacks {len(steps)} revisions, {steps[0].revision} to {steps[-1].revision}, and "
            "HOLDFAST_MIGRATE_AT_START is off. Run `holdfast admin migrate` of this version."
        )
    with database.read() as session:
        if _cut_off(session.connection()):
            raise CatalogTooOldError(
                "The last upgrade of the catalog was cut off before its end, and HOLDFAST_MIGRATE_AT_START is off. Run "
                "`holdfast admin migrate` of this version."
            )


def _missing(connection: Connection) -> list[Step]:
    current, _ = revisions(connection)
    known = _known_revisions()
    if current is None:
        return list(known)
    position = next((place for place, step in enumerate(known) if step.revision == current), None)
    if position is not None:
        return list(known[position + 1 :])
    works_from = _works_from(connection)
    if works_from in {step.revision for step in known}:
        return []
    raise CatalogTooNewError(
        f"The catalog is at revision {current}, which this version of Holdfast does not know"
        + (f", and works with revision {works_from} and newer" if works_from else "")
        + ". Install the version that wrote it, or set HOLDFAST_DATABASE_URL to another catalog."
    )


def _works_from(connection: Connection) -> str | None:
    """The oldest revision whose code can work with this newer catalog; None where it does not say so."""
    try:
        with connection.begin_nested():
            return cast("str | None", connection.execute(text("SELECT works_from FROM catalog_identity")).scalar())
    except DBAPIError:
        return None


def _cut_off(connection: Connection) -> bool:
    """Whether the revisions are all there, and what is made after the last one is not."""
    current, newest = revisions(connection)
    return connection.dialect.name == "postgresql" and current == newest and triggers_differ(connection)


def _upgrade_beside_saves(database: Database, wait_seconds: float) -> None:
    """Each try goes on with what is left, and so does another process after this one has died."""
    ends_at = time.monotonic() + wait_seconds
    with _unhurried_connection(database) as connection:
        while True:
            try:
                command.upgrade(alembic_config(connection, online=True), "head")
                return
            except DBAPIError as error:
                connection.rollback()
                if getattr(error.orig, "sqlstate", None) not in _RETRIED_SQLSTATES:
                    raise
                waits_for = _oldest_transaction(connection)
                if time.monotonic() > ends_at:
                    raise MigrationBlockedError(
                        f"A lock on a table was not to be had within {wait_seconds:g} s. The oldest transaction of the "
                        f"database is {waits_for}. End it or wait for its end, and run `holdfast admin migrate` again. "
                        "Services go on meanwhile."
                    ) from error
                _log.warning("migration_waits", oldest_transaction=waits_for)
            time.sleep(random.uniform(*_PAUSE_SECONDS))  # noqa: S311


def _oldest_transaction(connection: Connection) -> str:
    with connection.begin():
        found = connection.execute(_OLDEST).one_or_none()
    return "not known" if found is None else f"that of process {found.pid} ({found.name}), {found.seconds} s old"


_OLDEST = text("""
SELECT a.pid, a.application_name AS name,
  CAST(extract(epoch FROM clock_timestamp() - a.xact_start) AS bigint) AS seconds
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND EXISTS (
  SELECT 1 FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted)
ORDER BY a.xact_start LIMIT 1
""")


@contextmanager
def _unhurried_connection(database: Database) -> Iterator[Connection]:
    """Its statements have no end, but each transaction waits for locks no longer than LOCK_SECONDS. An index that is
    made concurrently waits as long as it takes, because nothing waits behind it."""
    from holdfast_service.db.postgres import LimitedConnection, limits

    lock_limit = f"SELECT set_config('lock_timeout', '{round(LOCK_SECONDS * 1000)}ms', true)"
    with database.engine.connect() as connection:
        raw = cast("LimitedConnection", connection.connection.dbapi_connection)

        @event.listens_for(connection, "begin")
        def _begin(begun: Any) -> None:
            begun.exec_driver_sql(limits(0, "true"))
            begun.exec_driver_sql(lock_limit)

        try:
            with raw.answering_within(None):
                if not raw.pooled:  # for what runs outside a transaction; a pooler's own connections have no limit
                    connection.exec_driver_sql(limits(0, "false"))
                    connection.commit()
                yield connection
        finally:
            connection.invalidate()  # its limits are not those of the others


def revisions(connection: Connection) -> tuple[str | None, str | None]:
    """The revision of the catalog, None if there is none, and the newest that this version knows."""
    return MigrationContext.configure(connection).get_current_revision(), _newest_revision()


def pending_revision(connection: Connection) -> str | None:
    """The newest revision of this version if the catalog lacks it; None if it is up to date, or newer and works with
    this version."""
    found, known = revisions(connection)
    if found == known:
        return None
    try:
        return known if _missing(connection) else None
    except CatalogTooNewError:
        return known


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(alembic_config())


@functools.cache
def _known_revisions() -> tuple[Step, ...]:
    """From the oldest on."""
    known = [Step(script.revision, script.doc.splitlines()[0]) for script in _scripts().walk_revisions()]
    return tuple(reversed(known))


def _newest_revision() -> str | None:
    return _known_revisions()[-1].revision


def alembic_config(connection: Connection | None = None, *, online: bool = False) -> Config:
    """`online`: each revision in a transaction of its own, and views and triggers are the caller's."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    config.attributes["online"] = online
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
            from holdfast_service.db.postgres import LimitedConnection, without_limits

            postgres = cast("LimitedConnection", connection.connection.dbapi_connection)
            # An index that is made concurrently waits for every snapshot. A statement that waits for a lock has one,
            # and so has a transaction whose last statement was prepared: hence tries, and in the simple protocol.
            asked = f"SELECT pg_try_advisory_xact_lock({_ADVISORY_LOCK})"
            while True:
                with connection.begin(), without_limits(postgres):
                    if postgres.execute(asked, prepare=False).fetchone() == (True,):
                        yield connection
                        return
                time.sleep(_ASKED_EVERY_SECONDS)
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
