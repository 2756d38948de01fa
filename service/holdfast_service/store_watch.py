"""Keeps asking for a store that was away at the start, and knows why it is not settled (protocol rule 34)."""

from __future__ import annotations

import threading
from contextlib import suppress

import structlog

from holdfast_service.catalog.store_row import ForeignStoreError, settle
from holdfast_service.catalog.tables import CatalogIdentity
from holdfast_service.database import Database
from holdfast_service.stores.base import Store, StoreError

_log = structlog.get_logger("holdfast.store")


class StoreWatch:
    """One per process. `problem` is None once the store was probed, or known from before, and is this catalog's."""

    def __init__(self, database: Database, store: Store, store_id: int, identity: CatalogIdentity) -> None:
        self._database = database
        self._store = store
        self._store_id = store_id
        self._identity = identity
        self._lock = threading.Lock()
        self.problem: str | None = "The store was not asked yet."

    def settle(self) -> None:
        """Raises ForeignStoreError; a store that is away leaves its reason in `problem`."""
        with self._lock:
            if self.problem is None:
                return
            try:
                settle(self._database, self._store, self._store_id, self._identity)
            except StoreError as error:
                self.problem = f"The store does not answer: {error}"
                _log.warning("store_away", reason=str(error))
            except ForeignStoreError as error:
                self.problem = str(error)
                _log.error("store_refused", reason=str(error))
                raise
            else:
                self.problem = None

    def tick(self) -> str | None:
        """A round of background work: asks again if need be; the problem that is left."""
        with suppress(ForeignStoreError):
            self.settle()
        return self.problem

    def check(self) -> str | None:
        """For /readyz: None if the store answers at this moment, else why not."""
        problem = self.tick()
        if problem is not None:
            return problem
        try:
            self._store.ping()
        except StoreError as error:
            return f"The store does not answer: {error}"
        return None
