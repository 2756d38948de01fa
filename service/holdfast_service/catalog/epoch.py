"""The catalog's epoch: what a restore of the database, a rebuild and a clone have to raise (protocol rule 5).

Afterwards every attempt of the old epoch is fenced, no copy is trusted before it was read again, and nothing is deleted
from the store until an operator adopts it: a cloned staging catalog must never delete production's chunks.
"""

from __future__ import annotations

from sqlalchemy import func, select, update

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.store_row import Marker, write_marker
from holdfast_service.catalog.tables import CatalogIdentity, Copy
from holdfast_service.database import Database
from holdfast_service.stores.base import Store


class NotCheckedError(RuntimeError):
    """Copies are still to be read again, so the store cannot be adopted yet."""


def raise_epoch(database: Database) -> int:
    """The new epoch. A running service of the old one says so in /readyz and must be started again."""
    with database.transaction() as session:
        identity = session.execute(select(CatalogIdentity).with_for_update()).scalar_one()
        identity.epoch += 1
        session.execute(
            update(Copy).where(Copy.state == CopyState.VERIFIED).values(state=CopyState.SUSPECT, leased_until=None)
        )
        return identity.epoch


def adopt_store(database: Database, store: Store, store_id: int) -> Marker:
    """Tells the store that it is this catalog's in this epoch; from then on the collector deletes again.

    Raises NotCheckedError while copies are suspect, and StoreError.
    """
    with database.read() as session:
        identity = session.execute(select(CatalogIdentity)).scalar_one()
        unchecked = session.scalar(
            select(func.count()).where(Copy.store_id == store_id, Copy.state == CopyState.SUSPECT)
        )
    if unchecked:
        raise NotCheckedError(
            f"{unchecked} copies were not read again since the epoch was raised. "
            "Let `holdfast serve` run until they are."
        )
    marker = Marker(identity.catalog_id, identity.epoch, store_id)
    write_marker(store, marker)
    return marker
