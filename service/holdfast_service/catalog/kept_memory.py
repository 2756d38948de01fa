"""What each process remembers of acknowledged changes, kept beside the data, outlives the process (protocol rule 36).

    history/<memory id>.json      one document per process, written by it alone, a moment after each change

A process that was started since, or that saw none of the changes, finds by it that the database has forgotten them. A
document of an earlier epoch counts no more: whoever raised the epoch knows that the database is an older one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import structlog

from holdfast_service.catalog.memory import Snapshot
from holdfast_service.catalog.tables import CatalogIdentity
from holdfast_service.clock import database_now
from holdfast_service.database import Database
from holdfast_service.errors import WentBackError
from holdfast_service.stores.base import ObjectMissing, Store

FOLDER = "history"
_GONE_AFTER = timedelta(days=1)

_log = structlog.get_logger("holdfast.history")


class KeptMemory:
    """One per opened store and process."""

    def __init__(self, database: Database, store: Store, identity: CatalogIdentity) -> None:
        self._database = database
        self._store = store
        self._catalog_id = identity.catalog_id
        self._epoch = identity.epoch
        self._writing = threading.Lock()
        self._kept: Snapshot | None = None
        self._compared_on: str | None = None

    def keep(self) -> None:
        """Writes what this process remembers, if it is not there yet. Raises StoreError."""
        with self._writing:
            known = self._database.memory.snapshot()
            if known == self._kept:
                return
            with self._database.read() as session:
                now = database_now(session)
            document = {
                "catalog_id": self._catalog_id,
                "epoch": self._epoch,
                "kept_at": now.isoformat(),
                "marks": sorted(known.marks.items()),
                "changes": known.changes,
            }
            self._store.write_named(_name(known.memory_id), json.dumps(document).encode())
            self._kept = known

    def compare(self, server: str) -> None:
        """With what every process has kept here, once for each server of the database. Raises WentBackError and
        StoreError."""
        if self._compared_on == server:
            return
        for name, document in list(self._documents()):
            known = _snapshot(name, document)
            with self._database.read() as session:
                lost = known.lost(session)
            if lost is not None:
                self._database.note_went_back(lost)
                raise WentBackError(lost, noticed=True)
        self._compared_on = server

    def forget_the_gone(self) -> None:
        """Takes away what processes have left that are gone. Called once this process has compared it, and has kept a
        mark of its own, which is newer than all of it. Raises StoreError."""
        with self._database.read() as session:
            oldest = database_now(session) - _GONE_AFTER
        for name, document in list(self._documents()):
            if name != _name(self._database.memory.id) and datetime.fromisoformat(document["kept_at"]) < oldest:
                self._store.delete_named(name)

    def _documents(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Those of this catalog and epoch, by name."""
        for name in list(self._store.list_named(FOLDER)):
            try:
                document = json.loads(self._store.read_named(name))
                ours = document["catalog_id"] == self._catalog_id and document["epoch"] >= self._epoch
                _snapshot(name, document)
                datetime.fromisoformat(document["kept_at"])
            except ObjectMissing:
                continue  # its process has just been forgotten
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("history_cannot_be_read", name=name, error=str(error))
                continue
            if ours:
                yield name, document


def _name(memory_id: str) -> str:
    return f"{FOLDER}/{memory_id}.json"


def _snapshot(name: str, document: dict[str, Any]) -> Snapshot:
    """Raises ValueError, KeyError and TypeError for what is none."""
    marks = {int(slot): int(number) for slot, number in document["marks"]}
    changes = tuple((int(slot), int(number), str(what)) for slot, number, what in document["changes"])
    return Snapshot(name.removeprefix(f"{FOLDER}/").removesuffix(".json"), marks, changes)
