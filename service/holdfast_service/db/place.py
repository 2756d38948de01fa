"""Which database this is, so that a copy of it somewhere else is known (rule fencing-token).

A clone says the same of itself as its original: the same catalog, the same epoch. Only where it lives tells the two
apart. Until an operator says what the other place means, the service changes nothing in a store from there.
"""

from __future__ import annotations

import os

from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import CatalogIdentity

MOVED = (
    "this database is a copy of the catalog, or was moved: it is not where the catalog was made. After a restore or "
    "for a clone, run `holdfast admin raise-epoch`; if it was moved and the old one is gone, "
    "`holdfast admin confirm-move`"
)


def place_of(database: Database) -> str | None:
    """The file of an SQLite catalog; the cluster and the database's number on Postgres. None if it is not told."""
    if not database.is_postgres:
        path = database.url.database
        return None if path in {None, "", ":memory:"} else f"sqlite:{os.stat(str(path)).st_ino}"
    number = "SELECT oid FROM pg_database WHERE datname = current_database()"
    with database.engine.connect() as connection:
        oid = connection.execute(text(number)).scalar_one()
        try:
            cluster = connection.execute(text("SELECT system_identifier FROM pg_control_system()")).scalar_one()
        except DBAPIError:  # some providers let no client read it
            cluster = "unknown"
    return f"postgres:{cluster}:{oid}"


def settle_place(database: Database) -> bool:
    """Notes the place of a catalog that has none yet. Whether the catalog is where it was."""
    place = place_of(database)
    with database.read() as session:
        found = session.execute(select(CatalogIdentity.place)).scalar_one()
    if found is not None:  # most starts: a catalog that takes no writes can be read
        return place is None or found == place
    with database.transaction() as session:
        identity = session.execute(select(CatalogIdentity).with_for_update()).scalar_one()
        if identity.place is None:
            identity.place = place
        return place is None or identity.place == place
