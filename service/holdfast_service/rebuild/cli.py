"""`holdfast catalog rebuild`: on the database itself, because there is no service without a catalog."""

from __future__ import annotations

import json as json_text
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr
from sqlalchemy.exc import ArgumentError

from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import revisions
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.rebuild.run import rebuild
from holdfast_service.secrets.keyring import keyring_of
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.stores.base import Store, StoreRefused, StoreUrlError
from holdfast_service.stores.registry import open_store

_SAID_EVERY_SECONDS = 2.0
# Tickets are never made with it: a rebuild only reads.
_NO_SIGNING_KEY = bytes(32)


def rebuild_catalog(
    settings: ServiceSettings, url: str, *, catalog_id: str | None, older_url: str | None, dry_run: bool, json: bool
) -> RebuildReport:
    """Reports on stdout, and says how far it is on stderr. With `dry_run` all of it happens in a temporary database.
    `older_url`: the database that is replaced; it is read.

    Raises what `rebuild` raises, and SettingsError.
    """
    keyring = keyring_of(settings)
    urls = [url, *(each for each in _configured(settings) if each != url)]
    opened = [(each, _opened(settings, each)) for each in urls]
    try:
        with _database(settings, dry_run=dry_run) as database, _older(settings, older_url) as older:
            report = rebuild(
                database,
                opened,
                _progress(),
                catalog_id=catalog_id,
                may_mark=not dry_run,
                older=older,
                keyring=keyring,
            )
    finally:
        for _, store in opened:
            store.close()
    if json:
        sys.stdout.write(json_text.dumps(report.document(), indent=2) + "\n")
        return report
    sys.stdout.write("\n".join(report.lines()) + "\n")
    if dry_run:
        sys.stdout.write("Nothing was written: this was a dry run.\n")
        return report
    sys.stdout.write(
        "Next: make a token (`holdfast admin create-token`; tokens and audit events are in no bucket), start the "
        "service, run `holdfast catalog check`, then `holdfast stores claim`. Restores work at once; until then "
        "nothing in the stores is changed.\n"
    )
    if report.doubts:
        sys.stdout.write(
            "What is not known may have been commits. Until a person confirms it, a run of these projects without a "
            "checkpoint is not begun from nothing: `holdfast catalog doubts`, `holdfast catalog confirm PROJECT/RUN`.\n"
        )
    return report


def _configured(settings: ServiceSettings) -> list[str]:
    """The URLs of the stores that the settings name; the embedded service's own folder has no setting."""
    return [url for url in (settings.store, settings.second_store, settings.cold_store) if url is not None]


def _opened(settings: ServiceSettings, url: str) -> Store:
    roles = [role for role, configured in settings.store_urls.items() if configured == url]
    try:
        return open_store(
            url, _NO_SIGNING_KEY, settings.store_credentials(roles[0]) if roles else None, group=settings.store_gid
        )
    except (StoreUrlError, StoreRefused) as error:
        raise SettingsError(str(error)) from None


@contextmanager
def _database(settings: ServiceSettings, *, dry_run: bool) -> Iterator[Database]:
    with tempfile.TemporaryDirectory(prefix="holdfast-rebuild-") as folder:
        if dry_run:
            aside = SecretStr(f"sqlite:///{Path(folder) / 'catalog.db'}")
            settings = settings.model_copy(update={"database_url": aside, "migrate_at_start": True})
        database = open_database(settings)
        try:
            yield database
        finally:
            database.dispose()


@contextmanager
def _older(settings: ServiceSettings, url: str | None) -> Iterator[Database | None]:
    """The database that is replaced. Nothing writes into it, its schema included: it may be the only copy."""
    if url is None:
        yield None
        return
    try:
        database = Database(url, statement_seconds=settings.database_statement_seconds, reads_only=True)
    except (ValueError, ArgumentError, ImportError) as error:
        raise SettingsError(
            f"--with-database cannot be opened ({error}). Name the database that is replaced as sqlite:///path or "
            "postgresql://user@host/name, or leave the option out."
        ) from None
    try:
        _refuse_another_schema(database)
        yield database
    finally:
        database.dispose()


def _refuse_another_schema(database: Database) -> None:
    """Raises SettingsError, and ProblemError(`database_unavailable`)."""
    with database.read() as session:
        found, known = revisions(session.connection())
    if found is None:
        raise SettingsError("--with-database names a database without a catalog. Name another, or leave it out.")
    if found != known:
        raise SettingsError(
            f"--with-database names a catalog at revision {found}; this version of Holdfast reads revision {known}. "
            "It is left as it is. Copy that database, start a Holdfast of this version on the copy once, which brings "
            "its tables up to date, and name the copy."
        )


def _progress() -> Callable[[str, int, int | None], None]:
    said_at = float("-inf")

    def say(what: str, done: int, total: int | None) -> None:
        nonlocal said_at
        if time.monotonic() - said_at < _SAID_EVERY_SECONDS:
            return
        said_at = time.monotonic()
        sys.stderr.write(f"{what}: {done}{'' if total is None else f' of {total}'}\n")

    return say
