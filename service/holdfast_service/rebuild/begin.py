"""The first step: an empty database becomes this bucket's catalog, in an epoch that no store has seen and under a claim
that no other database has (rule fencing-token).

Every attempt of before is fenced by it, no copy is trusted, and the stores stay as they are until they are adopted. A
store keeps the row's number that its marker names: two stores must never change places.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, exists, func, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.text import without_secrets
from holdfast_service.attached_stores.ownership import new_claim
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.place import place_of
from holdfast_service.db.tables.core import CatalogIdentity, Chunk, Project
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.rebuild.sources import RebuildRefusedError, SourceStore
from holdfast_service.secrets.kept import keep_signing_key
from holdfast_service.secrets.keyring import Keyring
from holdfast_service.stores.posix.signed_urls import new_signing_key

_ONLY_ROW = 1


def refuse_unless_rebuilding(session: Session) -> None:
    """Holds the last step off until the transaction's end: what comes after it would bring back what a service that
    runs by then has taken away."""
    identity = session.execute(select(CatalogIdentity).with_for_update(read=True)).scalar_one()
    if identity.rebuilding_from is None:
        raise RebuildRefusedError("Another process has ended this rebuild meanwhile.")


def begin(database: Database, sources: Sequence[SourceStore], keyring: Keyring) -> CatalogIdentity:
    """`keyring` encrypts the new signing key. Raises RebuildRefusedError for a database that holds a catalog. One that
    a rebuild from the same store has begun is gone on with, in the epoch that it was given."""
    url, catalog_id = sources[0].url, sources[0].marker.catalog_id
    place = place_of(database)
    with database.transaction() as session:
        identity = session.execute(select(CatalogIdentity).with_for_update()).scalar_one_or_none()
        if identity is not None and identity.rebuilding_from is not None:
            if (identity.rebuilding_from, identity.catalog_id) != (url, catalog_id):
                raise RebuildRefusedError(
                    f"A rebuild from {without_secrets(identity.rebuilding_from)} began in this database. Go on with "
                    "that one, or give HOLDFAST_DATABASE_URL an empty database."
                )
            return identity
        if session.scalar(select(exists(select(Project.id)))) or session.scalar(select(exists(select(Chunk.id)))):
            raise RebuildRefusedError(
                "The database holds a catalog already. Give HOLDFAST_DATABASE_URL an empty one; nothing was changed."
            )
        now = database_now(session)
        if identity is None:
            identity = CatalogIdentity(id=_ONLY_ROW, created_at=now)
            session.add(identity)
        identity.catalog_id = catalog_id
        identity.epoch = max(each.marker.epoch for each in sources) + 1
        identity.claim = new_claim()
        keep_signing_key(keyring, identity, new_signing_key())
        identity.place = place
        identity.rebuilding_from = url
        session.flush()
        session.execute(delete(StoreRow))
        for each in sources:
            session.add(
                StoreRow(
                    id=each.marker.store_id,
                    url=each.url,
                    kind=each.store.kind,
                    capabilities=None,
                    created_at=now,
                )
            )
        session.flush()
        if database.is_postgres:
            # The next store that is attached must not be given a number that a marker names.
            session.execute(
                text("SELECT setval(pg_get_serial_sequence('stores', 'id'), :highest)"),
                {"highest": session.scalar(select(func.max(StoreRow.id)))},
            )
        return identity
