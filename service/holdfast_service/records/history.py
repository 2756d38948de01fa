"""What each process remembers of acknowledged changes, kept beside the data, outlives the process and is compared with
the database before what cannot be taken back (rule database-went-back).

    history/<memory id>.json      one document per process, written by it alone, a moment after each change

A process that was started since, or that saw none of the changes, finds by it that the database has forgotten them. A
document of an earlier epoch counts no more: the operator who raised the epoch knows that the database is older. One of
another database in the same epoch, which owned the store before, says nothing of this one.
`db/engine.py` is what a process remembers and the question; this is its copy beside the data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog
from pydantic import AwareDatetime, BaseModel, ConfigDict
from sqlalchemy.exc import DBAPIError

from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database, Snapshot, forget_long_gone, if_writable, note_change, prove_history
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.errors import ProblemError, WentBackError
from holdfast_service.stores.base import ObjectMissing, ObjectTooLarge, Store, StoreError

if TYPE_CHECKING:
    from holdfast_service.context import ServiceContext


FOLDER = "history"
_GONE_AFTER = timedelta(days=1)
_MOST_BYTES = 1024 * 1024
"""Of one document: a mark for each transaction that was under way at once, and the newest changes in a line each."""

_log = structlog.get_logger("holdfast.history")


class _Kept(BaseModel):
    """The document of one process."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    catalog_id: str
    epoch: int
    claim: str = ""
    kept_at: AwareDatetime
    marks: tuple[tuple[int, int], ...]
    changes: tuple[tuple[int, int, str], ...]


class KeptMemory:
    """One per opened store and process."""

    def __init__(self, database: Database, store: Store, identity: CatalogIdentity) -> None:
        self._database = database
        self._store = store
        self._catalog_id = identity.catalog_id
        self._epoch = identity.epoch
        self._claim = identity.claim
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
            document = _Kept(
                catalog_id=self._catalog_id,
                epoch=self._epoch,
                claim=self._claim,
                kept_at=now,
                marks=tuple(sorted(known.marks.items())),
                changes=known.changes,
            )
            self._store.write_named(_name(known.memory_id), document.model_dump_json().encode())
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
                with suppress(DBAPIError):  # a standby that is behind takes no note; who asks next finds it again
                    self._database.note_went_back(lost)
                raise WentBackError(lost, noticed=True)
        self._compared_on = server

    def forget_the_gone(self) -> None:
        """Takes away what processes have left that are gone. Nothing, before this process has compared it here, and has
        kept a mark of its own, which is newer than all of it. Raises StoreError."""
        if self._compared_on is None or self._kept is None:
            return
        with self._database.read() as session:
            oldest = database_now(session) - _GONE_AFTER
        for name, document in list(self._documents()):
            if name != _name(self._database.memory.id) and document.kept_at < oldest:
                self._store.delete_named(name)

    def _documents(self) -> Iterator[tuple[str, _Kept]]:
        """Those of this catalog, in this epoch of this database or a later one, by name."""
        for name in list(self._store.list_named(FOLDER)):
            try:
                document = _Kept.model_validate_json(self._store.read_named(name, most_bytes=_MOST_BYTES))
            except ObjectMissing:
                continue  # its process has just been forgotten
            except (ValueError, ObjectTooLarge) as error:
                _log.warning("history_cannot_be_read", name=name, error=str(error))
                continue
            same = document.epoch == self._epoch and document.claim == self._claim
            if document.catalog_id == self._catalog_id and (document.epoch > self._epoch or same):
                yield name, document


def _name(memory_id: str) -> str:
    return f"{FOLDER}/{memory_id}.json"


def _snapshot(name: str, document: _Kept) -> Snapshot:
    memory_id = name.removeprefix(f"{FOLDER}/").removesuffix(".json")
    return Snapshot(memory_id, dict(document.marks), document.changes, document.kept_at)


_LOOK_SECONDS = 1.0
_REFRESHED_AFTER_SECONDS = 6 * 3600.0


def settle_history(context: ServiceContext) -> None:
    """Outside of any transaction, before an attempt is opened, a restore point chosen or something deleted. A store
    that does not answer is asked the next time. Raises WentBackError."""
    server = prove_history(context.database)
    for attached in context.stores:
        if attached.watch.unavailable:
            continue
        try:
            attached.watch.kept_memory.compare(server)
        except StoreError as error:
            _log.warning("history_not_compared", store=attached.role.value, error=str(error))


def keep_history(context: ServiceContext) -> None:
    """Brings what lies beside the data up to date, in each store that answers. Never raises."""
    for attached in context.stores:
        if attached.watch.unavailable:
            continue
        try:
            attached.watch.kept_memory.keep()
        except (StoreError, ProblemError) as error:
            _log.info("history_not_kept", store=attached.role.value, error=str(error))


def begin_history(context: ServiceContext) -> None:
    """At the start of a process, once its stores are attached: compares, and leaves a mark of its own. What is found
    is said by /readyz, and refuses by itself."""
    try:
        settle_history(context)
        with if_writable("a mark of this process"):
            with context.database.transaction() as session:
                forget_long_gone(session)
                note_change(session, "a process of the service was started")
            keep_history(context)
    except WentBackError as error:
        _log.error("database_went_back", reason=error.detail, lost=error.lost)
    except StoreError as error:
        _log.warning("history_not_compared", error=str(error))


def forget_the_gone(context: ServiceContext) -> None:
    """What processes that are gone have left in each store that answers. A bucket with versions has one of a document
    for each time that it was written, and to delete them may take hours. Never raises."""
    for attached in context.stores:
        if attached.watch.unavailable:
            continue
        try:
            attached.watch.kept_memory.forget_the_gone()
        except (StoreError, ProblemError) as error:
            _log.info("history_not_forgotten", store=attached.role.value, error=str(error))


class HistoryKeeper:
    """A thread that keeps the memory beside the data: a moment after each change, and a few times a day without one,
    because other processes take a silent process for gone. Another one forgets, once, those that are gone."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._keeps = threading.Thread(target=self._run, name="holdfast-history", daemon=True)
        self._forgets = threading.Thread(
            target=forget_the_gone, args=(context,), name="holdfast-history-forget", daemon=True
        )

    def start(self) -> None:
        self._keeps.start()
        self._forgets.start()

    def _run(self) -> None:
        memory, changed_at = self._context.database.memory, time.monotonic()
        while not self._context.stopping.is_set():
            if memory.changed.wait(_LOOK_SECONDS):
                memory.changed.clear()
                changed_at = time.monotonic()
                keep_history(self._context)
            elif time.monotonic() - changed_at > _REFRESHED_AFTER_SECONDS:
                with suppress(ProblemError), self._context.database.transaction() as session:
                    note_change(session, "a process of the service is alive")
