"""`holdfast admin restore`: a catalog of a backup, in a database that is empty, at a new epoch (rule fencing-token).

The backup's tables are made as its revision has them, and brought up to date afterwards. A restore that is cut off
leaves nothing, or a catalog that changes nothing in a store, because it says that its place is another one; the same
restore once more goes on with it.
"""

from __future__ import annotations

import lzma
import os
import secrets
import shutil
import sqlite3
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

import structlog
from alembic import command
from alembic.util import CommandError
from sqlalchemy import Connection, inspect, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from holdfast_protocol.problems import ProblemCode
from holdfast_service.attached_stores.epoch import raise_epoch
from holdfast_service.audit.record import Actor
from holdfast_service.backup.document import (
    CATALOG,
    TABLES,
    Backup,
    BackupRefusedError,
    member,
    read_manifest,
    sync_folder,
)
from holdfast_service.dashboards.views import ensure_views
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import (
    CatalogTooNewError,
    MigrationBlockedError,
    alembic_config,
    exclusive_connection,
    upgrade,
)
from holdfast_service.db.triggers import create_triggers, drop_triggers
from holdfast_service.errors import ProblemError
from holdfast_service.service import open_as_it_is
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.posix.signed_urls import new_signing_key

if TYPE_CHECKING:
    from psycopg import Connection as PostgresConnection

_log = structlog.get_logger("holdfast.backup")

_ELSEWHERE = "a backup"
"""Where the catalog lives, until its epoch is raised."""


def restore_backup(settings: ServiceSettings, path: Path) -> int:
    """The epoch. Raises BackupRefusedError, SettingsError, and ProblemError(`database_unavailable`)."""
    try:
        with zipfile.ZipFile(path) as archive:
            backup = read_manifest(archive)
            _check_kind(settings, backup)
            if backup.database == "sqlite":
                return _restore_sqlite(settings, archive, backup)
            return _restore_postgres(settings, archive, backup)
    # A spoilt header can name another compression, also one that zipfile does not know: its NotImplementedError.
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, EOFError, UnicodeDecodeError) as error:
        raise BackupRefusedError(f"{path} is no whole backup ({error}).") from None
    except OSError as error:
        raise BackupRefusedError(f"{path} cannot be restored ({error.strerror}).") from None


def _check_kind(settings: ServiceSettings, backup: Backup) -> None:
    kind = make_url(settings.database_url_text).get_backend_name()
    kind = "postgresql" if kind == "postgres" else kind  # some providers write it so
    if kind != backup.database:
        raise BackupRefusedError(
            f"The backup is of a catalog on {backup.database}, and HOLDFAST_DATABASE_URL names {kind}. Restore it into "
            "the same kind; from one to the other leads `holdfast catalog rebuild`."
        )


def _restore_sqlite(settings: ServiceSettings, archive: zipfile.ZipFile, backup: Backup) -> int:
    path = Path(str(make_url(settings.database_url_text).database))
    for there in (path, *(Path(f"{path}-{end}") for end in ("wal", "shm", "journal"))):
        if there.exists():
            raise BackupRefusedError(
                f"{there} is there already. A backup is restored where there is no catalog. Stop the service, and move "
                f"{path.name} away together with its -wal, -shm and -journal: SQLite would mix what is left of them "
                "into the restored catalog."
            )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with member(archive, CATALOG) as content:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                shutil.copyfileobj(content, file)
        database = Database(f"sqlite:///{fresh}")
        try:
            with database.engine.connect() as connection:
                found = connection.execute(text("SELECT catalog_id, epoch FROM catalog_identity")).one_or_none()
            if found is None or tuple(found) != (backup.catalog_id, backup.epoch):
                raise BackupRefusedError("The backup has another catalog than it says.")
            epoch = _made_current(database)
            with database.engine.connect() as connection:
                raw = cast("sqlite3.Connection", connection.connection.dbapi_connection)
                raw.execute("PRAGMA journal_mode=DELETE")  # all of it is in the one file
        except (SQLAlchemyError, sqlite3.DatabaseError) as error:
            raise BackupRefusedError(f"The backup's catalog is no whole database ({error}).") from None
        finally:
            database.dispose()
        os.link(fresh, path)  # the same file: the catalog knows its place by its number
        sync_folder(path.parent)
    finally:
        for left in (fresh, Path(f"{fresh}-wal"), Path(f"{fresh}-shm")):
            left.unlink(missing_ok=True)
    return epoch


def _restore_postgres(settings: ServiceSettings, archive: zipfile.ZipFile, backup: Backup) -> int:
    from psycopg import Error

    database = open_as_it_is(settings)
    try:
        with exclusive_connection(database) as connection:
            tables = inspect(connection).get_table_names()
            if not tables:
                try:
                    command.upgrade(alembic_config(connection), backup.revision)
                except CommandError:
                    raise BackupRefusedError(
                        f"The backup is of revision {backup.revision}, which this version of Holdfast does not know. "
                        f"Install the version that wrote it ({backup.holdfast})."
                    ) from None
                _load(connection, archive, backup)
            elif not _was_cut_off(connection, tables, backup):
                raise BackupRefusedError("The database has tables. A backup is restored into one that is empty.")
        return _made_current(database)
    except (DBAPIError, Error) as error:
        why = type(error.orig if isinstance(error, DBAPIError) else error).__name__
        raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, f"The backup could not be loaded ({why}).") from error
    finally:
        database.dispose()


def _was_cut_off(connection: Connection, tables: list[str], backup: Backup) -> bool:
    """Whether the database has this very backup, loaded by a restore that did not end."""
    if "catalog_identity" not in tables:
        return False
    found = connection.execute(text("SELECT catalog_id, epoch, place FROM catalog_identity")).one_or_none()
    return found is not None and tuple(found) == (backup.catalog_id, backup.epoch, _ELSEWHERE)


def _load(connection: Connection, archive: zipfile.ZipFile, backup: Backup) -> None:
    """Sums and references are in the backup: what would keep them is put back behind the rows."""
    drop_triggers(connection)
    references = connection.execute(_REFERENCES).all()
    for row in references:
        connection.exec_driver_sql(f'ALTER TABLE {row.of} DROP CONSTRAINT "{row.name}"')
    raw = cast("PostgresConnection", connection.connection.dbapi_connection)
    there = set(inspect(connection).get_table_names())
    for table, columns in backup.tables.items():
        if table not in there:  # of somebody else, in the same schema
            _log.warning("table_left_out", table=table, revision=backup.revision)
            continue
        if connection.exec_driver_sql(f'SELECT 1 FROM "{table}" LIMIT 1').first():  # noqa: S608
            connection.exec_driver_sql(f'DELETE FROM "{table}"')  # noqa: S608  a revision has put it there
        # They become a part of a statement, and COPY can run a program of the server.
        if not set(columns) <= {each["name"] for each in inspect(connection).get_columns(table)}:
            raise BackupRefusedError(f"The backup has columns of {table} that its revision {backup.revision} has not.")
        names = ", ".join(f'"{each}"' for each in columns)
        with member(archive, f"{TABLES}{table}") as content, raw.cursor() as cursor:
            with cursor.copy(f'COPY "{table}" ({names}) FROM STDIN') as rows:
                while block := content.read(1 << 20):
                    rows.write(block)
    for row in references:
        connection.exec_driver_sql(f'ALTER TABLE {row.of} ADD CONSTRAINT "{row.name}" {row.definition}')
    for name, last in backup.sequences.items():
        # NULL for that of a table that was left out: setval does nothing then.
        connection.execute(text("SELECT setval(to_regclass(quote_ident(:name)), :last)"), {"name": name, "last": last})
    create_triggers(connection)
    # No backup has a signing key, and what is signed with an empty one anybody could sign.
    marked = text("UPDATE catalog_identity SET place = :place, signing_key = :key")
    connection.execute(marked, {"place": _ELSEWHERE, "key": new_signing_key()})


_REFERENCES = text("""
SELECT conname AS name, CAST(conrelid AS regclass)::text AS of, pg_get_constraintdef(oid) AS definition
FROM pg_constraint WHERE contype = 'f' AND connamespace = CAST(quote_ident(current_schema()) AS regnamespace)
""")


def _made_current(database: Database) -> int:
    try:
        upgrade(database)
    except (CatalogTooNewError, MigrationBlockedError) as error:
        raise BackupRefusedError(str(error)) from None
    ensure_views(database)
    return raise_epoch(database, Actor.at_the_database())
