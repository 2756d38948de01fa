"""`holdfast admin backup`: the catalog as it is at one moment, in one file. Nothing waits for it: Postgres gives one
snapshot to all tables, and SQLite's own backup reads beside writers.

The signing key is left out, because a restored catalog gets a new one. Secrets of webhooks come along as the catalog
has them: encrypted (docs/adr/0068), or not at all.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from holdfast_protocol.problems import ProblemCode
from holdfast_service.backup.document import CATALOG, MANIFEST, TABLES, Backup, BackupRefusedError, sync_folder
from holdfast_service.db.dialect import unlimited
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import revisions
from holdfast_service.errors import ProblemError
from holdfast_service.release import VERSION

if TYPE_CHECKING:
    from psycopg import Connection as PostgresConnection

_VERSIONS = "alembic_version"


def write_backup(database: Database, path: Path, *, plain_secrets: bool = False) -> Backup:
    """What was written. The file appears when it is whole, for its owner alone.

    Raises BackupRefusedError, and ProblemError(`database_unavailable`).
    """
    with _new_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        try:
            if database.is_postgres:
                return _write_postgres(database, archive, plain_secrets)
            # Beside the catalog: SQLite works on no network filesystem, and a backup may be for one.
            beside = Path(str(database.url.database)).parent
            _check_room(database, beside)
            with tempfile.TemporaryDirectory(prefix=".holdfast-backup-", dir=beside) as folder:
                return _write_sqlite(database, archive, plain_secrets, Path(folder) / CATALOG)
        except (DBAPIError, sqlite3.Error) as error:
            raise _unreadable(error) from error


def _check_room(database: Database, folder: Path) -> None:
    """The service writes to the same disk. Raises BackupRefusedError."""
    with database.read() as session:
        size = session.scalars(text("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")).one()
    needed, free = round(_ROOM * size), shutil.disk_usage(folder).free
    if free < needed:
        raise BackupRefusedError(
            f"The backup is made of a copy in {folder}, which needs {needed} bytes there, and {free} are free. Make "
            "room first: on a full disk the service takes no saves."
        )


# The copy, and what VACUUM keeps of it until it is written anew.
_ROOM = 2.2


def _unreadable(error: Exception) -> ProblemError | BackupRefusedError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    if str(cause) == "database or disk is full":
        return BackupRefusedError(
            "The catalog's disk, or the one for temporary files, has become full. Make room there, and try again."
        )
    return ProblemError(ProblemCode.DATABASE_UNAVAILABLE, f"The catalog could not be read ({type(cause).__name__}).")


def _write_postgres(database: Database, archive: zipfile.ZipFile, plain_secrets: bool) -> Backup:
    from psycopg import Error

    with database.read(snapshot=True) as session:
        connection = session.connection()
        described = _described(connection, plain_secrets)
        raw = cast("PostgresConnection", connection.connection.dbapi_connection)
        try:
            with unlimited(connection):
                for table, columns in described.tables.items():
                    kept = ", ".join(_kept(table, each) for each in columns)
                    with archive.open(f"{TABLES}{table}", "w", force_zip64=True) as member, raw.cursor() as cursor:
                        with cursor.copy(f'COPY (SELECT {kept} FROM "{table}") TO STDOUT') as rows:  # noqa: S608
                            for block in rows:
                                member.write(block)
        except Error as error:
            raise _unreadable(error) from error
        archive.writestr(MANIFEST, described.to_json())
        return described


def _kept(table: str, column: str) -> str:
    if (table, column) == ("catalog_identity", "signing_key"):
        return "CAST('' AS bytea)"
    return "NULL" if (table, column) == ("catalog_identity", "encrypted_with") else f'"{column}"'


def _write_sqlite(database: Database, archive: zipfile.ZipFile, plain_secrets: bool, copied: Path) -> Backup:
    with closing(sqlite3.connect(copied)) as target, database.engine.connect() as connection:
        # All pages at once: one snapshot, whatever is written meanwhile.
        cast("sqlite3.Connection", connection.connection.dbapi_connection).backup(target, pages=-1)
    aside = Database(f"sqlite:///{copied}")
    try:
        with aside.engine.begin() as connection:
            described = _described(connection, plain_secrets)
            connection.execute(text("UPDATE catalog_identity SET signing_key = x''"))
            if _knows_encryption(connection):
                connection.execute(text("UPDATE catalog_identity SET encrypted_with = NULL"))
    finally:
        aside.dispose()
    # What was overwritten or deleted is in free pages until the file is written anew.
    with closing(sqlite3.connect(copied)) as target:
        target.execute("PRAGMA journal_mode=DELETE")
        target.execute("VACUUM")
    archive.write(copied, CATALOG)
    archive.writestr(MANIFEST, described.to_json())
    return described


def _described(connection: Connection, plain_secrets: bool) -> Backup:
    revision, _ = revisions(connection)
    if revision is None:
        raise BackupRefusedError("There is no catalog in this database. Correct HOLDFAST_DATABASE_URL.")
    identity = connection.execute(text("SELECT catalog_id, epoch, rebuilding_from FROM catalog_identity")).one_or_none()
    if identity is None or identity.rebuilding_from is not None:
        raise BackupRefusedError("The catalog was never served, or is half rebuilt: there is nothing to back up yet.")
    is_postgres = connection.dialect.name == "postgresql"
    # Of deleted ones, too: their rows keep the URL, which may be a secret.
    nothing = "CAST('' AS bytea)" if is_postgres else "x''"
    plain = f"(url <> '' OR secret <> {nothing})"
    if _knows_encryption(connection):
        plain += " AND encrypted_with IS NULL"
    count = connection.execute(text(f"SELECT count(*) FROM webhooks WHERE {plain}")).scalar_one()  # noqa: S608
    if count and not plain_secrets:
        raise BackupRefusedError(
            f"The catalog has the secrets of {count} webhooks unencrypted, and the backup would, too. Give the service "
            "a HOLDFAST_SECRETS_KEY, which encrypts them at its next start; or say --plain-secrets."
        )
    now = "to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC')"
    tables: dict[str, list[str]] = {}
    if is_postgres:
        inspector = inspect(connection)
        names = sorted(set(inspector.get_table_names()) - {_VERSIONS})
        tables = {name: [str(each["name"]) for each in inspector.get_columns(name)] for name in names}
    return Backup(
        catalog_id=identity.catalog_id,
        epoch=identity.epoch,
        revision=revision,
        database="postgresql" if is_postgres else "sqlite",
        made_at=connection.execute(text(f"SELECT {now}" if is_postgres else _SQLITE_NOW)).scalar_one(),
        holdfast=VERSION,
        tables=tables,
        sequences={row.name: row.last for row in connection.execute(_SEQUENCES)} if is_postgres else {},
    )


def _knows_encryption(connection: Connection) -> bool:
    """False for a catalog of a version before 0030, which is backed up before its upgrade."""
    return "encrypted_with" in {each["name"] for each in inspect(connection).get_columns("webhooks")}


_SQLITE_NOW = "SELECT strftime('%Y-%m-%d %H:%M:%S UTC', 'now')"
# They are of no snapshot, and never behind it.
_SEQUENCES = text(
    "SELECT sequencename AS name, last_value AS last FROM pg_sequences "
    "WHERE schemaname = current_schema() AND last_value IS NOT NULL"
)


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Under another name until the block has ended. Raises BackupRefusedError if the file is there already."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists():
            raise FileExistsError
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BackupRefusedError(
            f"{path} is there already. Name another file, for example with today's date."
        ) from None
    except OSError as error:
        raise BackupRefusedError(f"{path} cannot be written ({error.strerror}).") from None
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(fresh, path)
        sync_folder(path.parent)
    except FileExistsError:
        raise BackupRefusedError(f"{path} has appeared meanwhile, and is left alone.") from None
    except OSError as error:
        raise BackupRefusedError(f"{path} cannot be written ({error.strerror}).") from None
    finally:
        fresh.unlink(missing_ok=True)


def _publish(fresh: Path, path: Path) -> None:
    """Raises FileExistsError and OSError."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        raise
    except OSError:  # a filesystem without hard links, as many that backups go to
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(fresh, path)
