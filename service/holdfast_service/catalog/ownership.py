"""Whether a store is this catalog's, in this epoch: asked by the store itself before the service changes anything in it
(protocol rule 5).

A clone of the catalog, one that was restored and one that was rebuilt must neither delete nor overwrite what the store
holds, whichever controller it is and whoever wrote it; so the question stands in the store's own writes and not in each
controller. After an operator's `store adopt` the answer is yes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import select

from holdfast_service.catalog.place import MOVED, place_of
from holdfast_service.catalog.store_row import ForeignStoreError, read_marker
from holdfast_service.catalog.tables import CatalogIdentity
from holdfast_service.catalog.went_back import prove_history
from holdfast_service.database import Database
from holdfast_service.errors import WentBackError
from holdfast_service.stores.base import ObjectMissing, Store, StoreError, StoreNotOurs

# A yes is good for so long: a collector asks for each object that it deletes.
_FRESH_SECONDS = 10.0


class Ownership:
    """One per opened store and process. Called, it raises StoreNotOurs, or StoreError if the store is away."""

    def __init__(self, database: Database, store: Store, identity: CatalogIdentity) -> None:
        self._database = database
        self._store = store
        self._catalog_id = identity.catalog_id
        self._epoch = identity.epoch
        self._place = place_of(database)
        self._ours_at = float("-inf")
        self._opened = threading.local()

    def __call__(self) -> None:
        if getattr(self._opened, "by_this_thread", False) or time.monotonic() - self._ours_at < _FRESH_SECONDS:
            return
        problem = self.problem()
        if problem is not None:
            raise StoreNotOurs(problem)
        self._ours_at = time.monotonic()

    def holds(self) -> bool:
        """Whether anything may be changed in the store now; False if it is away."""
        try:
            self()
        except StoreError:
            return False
        return True

    def problem(self) -> str | None:
        """Why nothing may be changed, asked anew; None if it may. Raises StoreError if the store is away."""
        with self._database.read() as session:
            identity = session.execute(select(CatalogIdentity)).scalar_one()
        try:
            prove_history(self._database)
        except WentBackError as error:
            return error.detail
        if identity.place is not None and self._place is not None and identity.place != self._place:
            return MOVED
        if identity.epoch != self._epoch or identity.rebuilding_from is not None:
            return f"the catalog is at epoch {identity.epoch} and this process was started in {self._epoch}; restart it"
        try:
            marker = read_marker(self._store)
        except ObjectMissing:
            return "the store does not say whose it is: its marker is missing. Is its disk or bucket mounted?"
        except ForeignStoreError as error:
            return str(error)
        if marker.catalog_id != self._catalog_id:
            return f"the store belongs to the catalog {marker.catalog_id} and this one is {self._catalog_id}"
        if marker.epoch != self._epoch:
            return (
                f"the store is in epoch {marker.epoch} and this catalog in {self._epoch}. "
                "Run `holdfast catalog check`, then `holdfast store adopt`"
            )
        return None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lets this thread write all the same: for the probe, and for the marker that says whose the store is."""
        self._opened.by_this_thread = True
        try:
            yield
        finally:
            self._opened.by_this_thread = False
