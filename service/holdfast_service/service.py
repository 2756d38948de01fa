"""Opens the service: from settings to the context that every operation is given. The start of every process.

settings -> keys -> identity file -> database -> migrations -> identity -> secrets -> store (may be unavailable) ->
first token -> context -> app.create_app
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from sqlalchemy.exc import ArgumentError

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import StoreRole
from holdfast_service.attached_stores.attached import SETTING_OF_ROLE, AttachedStore, StoreWatch
from holdfast_service.attached_stores.ownership import ForeignStoreError, Marker, find_row, keep_address, read_marker
from holdfast_service.auth.bootstrap import ensure_bootstrap_token, ensure_identity, ensure_token_file
from holdfast_service.auth.principal import check_entropy
from holdfast_service.context import CommitNotifier, ServiceContext
from holdfast_service.dashboards.views import ensure_views
from holdfast_service.db.engine import Database, DatabaseConfigurationError, if_writable, what_can_be_lost
from holdfast_service.db.migrate import (
    CatalogTooNewError,
    CatalogTooOldError,
    MigrationBlockedError,
    check_up_to_date,
    upgrade,
)
from holdfast_service.db.place import MOVED, settle_place
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.errors import ProblemError
from holdfast_service.identity.identities import identities_of
from holdfast_service.insights.save_interval import SaveAdvice
from holdfast_service.records.history import begin_history, keep_history
from holdfast_service.records.outbox import due_since_attached
from holdfast_service.secrets.kept import settle_secrets
from holdfast_service.secrets.keyring import keyring_of
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.stores.base import Store, StoreError, StoreRefused, StoreUrlError
from holdfast_service.stores.posix.files import close_folder
from holdfast_service.stores.posix.signed_urls import key_of_role
from holdfast_service.stores.read_rate_limit import ReadRateLimit
from holdfast_service.stores.registry import open_store

_log = structlog.get_logger("holdfast.start")


def open_service(settings: ServiceSettings) -> ServiceContext:
    """Ready to serve, though the store may be unavailable (rule store-outage-degrades), or the catalog take no writes.

    Raises SettingsError, which names the setting, and ProblemError(`database_unavailable`). Close it with
    `close_service`.
    """
    keyring = keyring_of(settings)
    identities = identities_of(settings)
    database = open_database(settings)
    try:
        identity = ensure_identity(database, keyring)
        if identity.rebuilding_from is not None:
            raise SettingsError(
                "HOLDFAST_DATABASE_URL names a catalog that is half rebuilt. Run `holdfast catalog rebuild --from "
                f"{identity.rebuilding_from}` again; it goes on where it was cut off."
            )
        signing_key = settle_secrets(database, keyring)
        if not settle_place(database):
            _log.warning("nothing_is_changed_in_the_stores", reason=MOVED)
        opened = {
            role: _opened(settings, role, url, key_of_role(signing_key, role))
            for role, url in settings.store_urls.items()
        }
        stores = [_attach(database, identity, role, url, opened) for role, url in settings.store_urls.items()]
        _refuse_one_store_twice(stores)
        for attached in stores:
            with if_writable("where the store was found"):
                keep_address(database, attached.store_id, settings.store_urls[attached.role])
        _ensure_first_token(settings, database)
    except BaseException:
        database.dispose()
        raise
    context = ServiceContext(
        settings=settings,
        database=database,
        store=stores[0].store,
        store_id=stores[0].store_id,
        store_watch=stores[0].watch,
        stores=tuple(stores),
        catalog_id=identity.catalog_id,
        epoch=identity.epoch,
        claim=identity.claim,
        signing_key=signing_key,
        identities=identities,
        keyring=keyring,
        notifier=CommitNotifier(database),
        read_rate_limit=ReadRateLimit(settings.prove_bytes_per_second),
        save_advice=SaveAdvice(settings, database),
    )
    begin_history(context)
    with if_writable("which records are due"), database.transaction() as session:
        due_since_attached(session, context)
    for sentence in what_can_be_lost(database):
        _log.warning("acknowledged_commits_can_be_lost", reason=sentence)
    return context


def open_database(settings: ServiceSettings) -> Database:
    """With its tables up to date, or newer and fit for this version. Raises SettingsError and
    ProblemError(`database_unavailable`)."""
    database = open_as_it_is(settings)
    try:
        if settings.migrate_at_start:
            upgrade(database)
        else:
            check_up_to_date(database)
        ensure_views(database)
    except MigrationBlockedError as error:
        database.dispose()
        raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, str(error)) from None
    except CatalogTooOldError as error:
        database.dispose()
        raise SettingsError(str(error)) from None
    except CatalogTooNewError as error:
        database.dispose()
        raise SettingsError(f"HOLDFAST_DATABASE_URL: {error}") from None
    except BaseException:
        database.dispose()
        raise
    return database


def open_as_it_is(settings: ServiceSettings) -> Database:
    """Without a look at its tables: there may be none, or others. Raises SettingsError."""
    if settings.database_url is None:
        try:
            settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SettingsError(
                f"HOLDFAST_DATA_DIR: the folder {settings.data_dir} cannot be made ({error.strerror}). "
                "Name one that can be written."
            ) from None
        _close_data_folder(settings.data_dir)
    try:
        return Database(
            settings.database_url_text,
            statement_seconds=settings.database_statement_seconds,
            connections=settings.database_connections,
        )
    except DatabaseConfigurationError as error:
        raise SettingsError(str(error)) from None
    except (ArgumentError, ImportError):
        raise SettingsError(
            "HOLDFAST_DATABASE_URL names a driver that is not there. Use sqlite:///path or postgresql://user@host/name."
        ) from None


def _close_data_folder(folder: Path) -> None:
    """It holds the catalog with its keys, the token and the store."""
    holds_ours = any((folder / name).exists() for name in ("catalog.db", "token", "store"))
    try:
        close_folder(folder, holds_ours=holds_ours)
    except (StoreRefused, OSError) as error:
        raise SettingsError(f"HOLDFAST_DATA_DIR cannot be used: {error}.") from None


def close_service(context: ServiceContext) -> None:
    keep_history(context)
    for attached in context.stores:
        attached.store.close()
    context.database.dispose()


def _opened(settings: ServiceSettings, role: StoreRole, url: str, signing_key: bytes) -> Store:
    try:
        return open_store(url, signing_key, settings.store_credentials(role), group=settings.store_gid)
    except StoreUrlError as error:
        raise SettingsError(f"{SETTING_OF_ROLE[role]}: {error}") from None
    except StoreRefused as error:
        raise SettingsError(f"{SETTING_OF_ROLE[role]} cannot be used: {error}") from None


def _attach(
    database: Database, identity: CatalogIdentity, role: StoreRole, url: str, opened: Mapping[StoreRole, Store]
) -> AttachedStore:
    """Settled; an unavailable one is asked again later."""
    store, others = opened[role], [each for other, each in opened.items() if other is not role]
    marker = _marker_if_there(store)
    if marker is not None and _is_given_anew(marker, identity, others):
        marker = None
    row = find_row(database, url, store.kind, marker, identity.catalog_id)
    watch = StoreWatch(database, store, row.id, identity)
    try:
        watch.settle()
    except ForeignStoreError as error:
        raise SettingsError(f"{SETTING_OF_ROLE[role]}: {error}") from None
    return AttachedStore(role, store, row.id, watch)


def _is_given_anew(marker: Marker, identity: CatalogIdentity, others: Iterable[Store]) -> bool:
    """Whether a marker of an older epoch has a number that another store has in this one: after a rebuild that lacked
    the store, the next new store may be given its number."""
    ours = (identity.catalog_id, identity.epoch, identity.claim)
    if marker.is_claimed_by(*ours):
        return False
    found = (_marker_if_there(each) for each in others)
    return any(each is not None and each.is_of({marker.store_id}, *ours) for each in found)


def _refuse_one_store_twice(stores: list[AttachedStore]) -> None:
    """Two roles on one place would be one copy that is counted twice."""
    for position, attached in enumerate(stores):
        for other in stores[:position]:
            if attached.store_id == other.store_id:
                raise SettingsError(
                    f"{SETTING_OF_ROLE[attached.role]} is the same store as {SETTING_OF_ROLE[other.role]}. Give it a "
                    "bucket, a folder or a prefix of its own, or leave it out."
                )


def _marker_if_there(store: Store) -> Marker | None:
    with suppress(StoreError, ForeignStoreError):
        return read_marker(store)
    return None


def _ensure_first_token(settings: ServiceSettings, database: Database) -> None:
    if settings.bootstrap_token is not None:
        text = settings.bootstrap_token.get_secret_value()
        try:
            check_entropy(text)
        except ValueError as error:
            raise SettingsError(f"HOLDFAST_BOOTSTRAP_TOKEN is not usable: {error}.") from None
        if ensure_bootstrap_token(database, text):
            _log.info("bootstrap_token_added")
    if settings.embedded:
        try:
            if ensure_token_file(database, settings.token_file):
                _log.info("token_made", file=str(settings.token_file))
        except OSError as error:
            raise SettingsError(
                f"HOLDFAST_DATA_DIR: the token file {settings.token_file} cannot be written ({error.strerror}). "
                "Fix its permissions, or name another folder."
            ) from None
