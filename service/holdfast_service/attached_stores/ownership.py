"""Which row of `stores` an opened store is, and whether the store agrees (rules fencing-token and
store-outage-degrades).

A marker in the store names the catalog that owns it, that catalog's epoch and the row. A store with a new address
therefore keeps its row, a clone's catalog cannot take production's objects for its own, an absent mount is not taken
for an empty store, and two stores that change places are not taken for each other. `StoreWatch` settles later a store
that is unavailable at the start.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from holdfast_service.audit.record import Actor, record_event
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database, prove_history
from holdfast_service.db.place import MOVED, place_of
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.db.tables.core import Store as StoreRow
from holdfast_service.errors import WentBackError
from holdfast_service.stores.base import (
    Capabilities,
    ObjectMissing,
    ObjectTooLarge,
    Store,
    StoreError,
    StoreNotOurs,
    StoreUnavailable,
)

_MOMENTS = ("probed_at", "changed_at")
MARKER_NAME = "holdfast-store.json"
_MOST_MARKER_BYTES = 64 * 1024


class ForeignStoreError(RuntimeError):
    """The store belongs to another catalog. Nothing of it is ever deleted."""


_Number = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""As the catalog's columns hold it."""


@dataclass(frozen=True)
class Marker:
    """`claim` tells two databases apart that hold the same epoch of one catalog, as a clone and a catalog that was
    restored later do. It is "" until the first raise of the epoch, and in every marker of before 0029."""

    catalog_id: str
    epoch: _Number
    store_id: _Number
    claim: str = ""

    def is_claimed_by(self, catalog_id: str, epoch: int, claim: str) -> bool:
        return (self.catalog_id, self.epoch, self.claim) == (catalog_id, epoch, claim)

    def is_of(self, store_ids: Collection[int], catalog_id: str, epoch: int, claim: str) -> bool:
        """Whether it is this very database's and stands for one of these stores. If a store says so of another one,
        that was moved, or two have changed places. A database that went back may not know the one that is named."""
        return self.is_claimed_by(catalog_id, epoch, claim) and self.store_id in store_ids

    def outdoes(self, epoch: int, claim: str) -> bool:
        """Whether another database of this catalog has claimed the store in the same epoch, or any in a later one."""
        return self.epoch > epoch or (self.epoch == epoch and self.claim != claim)


_MARKER = TypeAdapter(Marker)


def new_claim() -> str:
    """Drawn with each new epoch: two copies of one catalog raise theirs to the same number."""
    return secrets.token_hex(16)


def find_row(database: Database, url: str, kind: str, marker: Marker | None, catalog_id: str) -> StoreRow:
    """The row that the marker names, else the one with this URL, else a new one."""
    by_url = select(StoreRow).where(StoreRow.url == url)
    with database.transaction() as session:
        row = session.get(StoreRow, marker.store_id) if marker and marker.catalog_id == catalog_id else None
        row = row or session.scalar(by_url)  # most starts: a catalog that takes no writes can be read
        if row is not None:
            return row
        fresh = {"url": url, "kind": kind, "capabilities": None, "created_at": database_now(session)}
        insert_absent(session, StoreRow, [fresh])
        # Read afterwards: another service that started at the same moment may have been first.
        return session.execute(by_url).scalar_one()


def keep_address(database: Database, store_id: int, url: str) -> None:
    """Where the store was found: without its marker, as long as it does not answer, a start takes the row that has the
    address. A row that had this one gets the old one of the store. The two have changed places; or the store did not
    answer at its new address, and got a row there that is nobody's now."""
    with database.transaction() as session:
        if session.scalar(select(StoreRow.url).where(StoreRow.id == store_id)) == url:
            return
        both = session.scalars(
            select(StoreRow)
            .where(or_(StoreRow.id == store_id, StoreRow.url == url))
            .order_by(StoreRow.id)
            .with_for_update()
        ).all()
        row = next(each for each in both if each.id == store_id)
        before = row.url
        for other in both:
            other.url = f"{before} of {other.id}"  # no two rows have one address, not even between two statements
        session.flush()
        row.url = url
        session.flush()
        for other in both:
            if other is not row:
                other.url = before


def settle(database: Database, store: Store, store_id: int, identity: CatalogIdentity) -> None:
    """Asks the store: probes it the first time, and compares its marker. Raises StoreError and ForeignStoreError."""
    with database.read() as session:
        row = session.execute(select(StoreRow).where(StoreRow.id == store_id)).scalar_one()
        others = other_stores(session, store_id)
    if row.capabilities is None:
        with suppress(StoreError):
            _check(read_marker(store), identity, others)  # before anything is written
        capabilities = store.probe()
        try:
            marker = read_marker(store)
        except ObjectMissing:
            marker = Marker(identity.catalog_id, identity.epoch, store_id, identity.claim)
            write_marker(store, marker)
        _check(marker, identity, others)
        with database.transaction() as session:
            session.execute(
                update(StoreRow).where(StoreRow.id == store_id).values(capabilities=capabilities_document(capabilities))
            )
        return
    store.capabilities = capabilities_of(row.capabilities)
    store.ping()
    try:
        _check(read_marker(store), identity, others)
    except ObjectMissing:
        raise StoreUnavailable(
            f"the store has no {MARKER_NAME}, which this catalog once wrote there: is its disk or bucket mounted?"
        ) from None


def probe_again(database: Database, store: Store, store_id: int) -> dict[str, tuple[Any, Any]]:
    """Probes a settled store anew, and keeps what it found. What has changed since, by name, as (before, now): it is an
    audit event as well. Raises StoreError, with nothing changed."""
    before = store.capabilities
    found = store.probe()
    was = {} if before is None else asdict(before)
    changed = {
        name: (was.get(name), now)
        for name, now in asdict(found).items()
        if name not in _MOMENTS and was.get(name) not in (now, None)
    }
    changed_at = found.probed_at if changed else None if before is None else before.changed_at
    store.capabilities = replace(found, changed_at=changed_at)
    with database.transaction() as session:
        session.execute(
            update(StoreRow)
            .where(StoreRow.id == store_id)
            .values(capabilities=capabilities_document(store.capabilities))
        )
        if changed:
            record_event(
                session,
                Actor.controller("stores"),
                "store.capabilities",
                reason=f"store {store_id} enforces something else than before",
                before={name: was for name, (was, _) in changed.items()},
                after={name: now for name, (_, now) in changed.items()},
            )
    return changed


def deletes_are_allowed(store: Store, store_id: int, catalog_id: str, epoch: int, claim: str) -> bool:
    """Whether the store agrees, right now, that it is this one of this catalog's stores, in this epoch: asked before
    anything is deleted.

    After a restore, a rebuild or a clone epoch and claim are others than the store's, until an operator claims the
    store.
    """
    try:
        marker = read_marker(store)
    except ObjectMissing:
        return False
    return marker.is_claimed_by(catalog_id, epoch, claim) and marker.store_id == store_id


def read_marker(store: Store) -> Marker:
    """Raises ObjectMissing, other StoreErrors, and ForeignStoreError for an unreadable marker."""
    try:
        return _MARKER.validate_json(store.read_named(MARKER_NAME, most_bytes=_MOST_MARKER_BYTES))
    except (ValueError, ObjectTooLarge) as error:
        raise ForeignStoreError(
            f"The store's {MARKER_NAME} cannot be read. Give HOLDFAST_STORE a prefix of its own."
        ) from error


def write_marker(store: Store, marker: Marker) -> None:
    store.write_named(MARKER_NAME, json.dumps(asdict(marker)).encode())


def capabilities_document(capabilities: Capabilities) -> dict[str, Any]:
    facts = asdict(capabilities)
    return facts | {name: facts[name].isoformat() for name in _MOMENTS if facts[name] is not None}


def capabilities_of(document: dict[str, Any]) -> Capabilities:
    moments = {name: datetime.fromisoformat(document[name]) for name in _MOMENTS if document.get(name)}
    return Capabilities(**(document | moments))


def other_stores(session: Session, store_id: int) -> set[int]:
    """The rows of the catalog's other stores."""
    return set(session.scalars(select(StoreRow.id).where(StoreRow.id != store_id)))


def misplaced(marker: Marker) -> str:
    """What people are told of a store that is another of the catalog's (`Marker.is_of`)."""
    return (
        f"The store says that it is number {marker.store_id} of this catalog's stores, and this process has it as "
        "another one: it was moved, or has changed places with another, since this process was started. Nothing is "
        "written there. Look at what the settings name and what is mounted, and start the service again."
    )


def _check(marker: Marker, identity: CatalogIdentity, others: Collection[int]) -> None:
    if marker.catalog_id != identity.catalog_id:
        raise ForeignStoreError(
            f"The store belongs to the catalog {marker.catalog_id} and this one is {identity.catalog_id}. Give "
            "HOLDFAST_STORE a prefix of its own, or HOLDFAST_DATABASE_URL the catalog that owns the store."
        )
    if marker.outdoes(identity.epoch, identity.claim):
        raise ForeignStoreError(
            f"The store has seen epoch {marker.epoch} of this catalog{elsewhere(marker.epoch, identity.epoch)}, and "
            f"this one is at {identity.epoch}: it was restored from an older state, or is a clone. Raise its epoch "
            "with `holdfast admin raise-epoch`."
        )
    if marker.is_of(others, identity.catalog_id, identity.epoch, identity.claim):
        raise ForeignStoreError(misplaced(marker))


def elsewhere(claimed: int, epoch: int) -> str:
    """What a sentence about the marker's epoch adds if the number alone does not tell the difference."""
    return " in another database" if claimed == epoch else ""


# A yes is good for so long: a collector asks for each object that it deletes.
_FRESH_SECONDS = 10.0


class Ownership:
    """Whether a store is this catalog's, in this epoch: one per opened store and process, asked by the store itself
    before the service changes anything in it (rule fencing-token). Called, it raises StoreNotOurs, or StoreError if the
    store is unavailable.

    A clone of the catalog, a restored one and a rebuilt one must neither delete nor overwrite what the store holds,
    whichever controller acts; the check is therefore in the store's own writes and not in each controller. After an
    operator's `stores claim` the answer is yes.
    """

    def __init__(self, database: Database, store: Store, store_id: int, identity: CatalogIdentity) -> None:
        self._database = database
        self._store = store
        self._store_id = store_id
        self._catalog_id = identity.catalog_id
        self._epoch = identity.epoch
        self._claim = identity.claim
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
        """Whether anything may be changed in the store now; False if it is unavailable."""
        try:
            self()
        except StoreError:
            return False
        return True

    def problem(self) -> str | None:
        """Why nothing may be changed, asked anew; None if it may. Raises StoreError if the store is unavailable."""
        with self._database.read() as session:
            identity = session.execute(select(CatalogIdentity)).scalar_one()
        try:
            prove_history(self._database)
        except WentBackError as error:
            return error.detail
        if identity.place is not None and self._place is not None and identity.place != self._place:
            return MOVED
        same = (identity.epoch, identity.claim) == (self._epoch, self._claim)
        if not same or identity.rebuilding_from is not None:
            return f"the catalog is at epoch {identity.epoch} and this process was started in {self._epoch}; restart it"
        try:
            marker = read_marker(self._store)
        except ObjectMissing:
            return "the store does not say whose it is: its marker is missing. Is its disk or bucket mounted?"
        except ForeignStoreError as error:
            return str(error)
        if marker.catalog_id != self._catalog_id:
            return f"the store belongs to the catalog {marker.catalog_id} and this one is {self._catalog_id}"
        if not marker.is_claimed_by(self._catalog_id, self._epoch, self._claim):
            first = "raise the epoch, start again, " if marker.outdoes(self._epoch, self._claim) else ""
            return (
                f"the store is in epoch {marker.epoch}{elsewhere(marker.epoch, self._epoch)} and this catalog in "
                f"{self._epoch}. If the store is to be its own, {first}run `holdfast catalog check`, then `holdfast "
                "stores claim`"
            )
        if marker.store_id == self._store_id:
            return None
        with self._database.read() as session:
            if marker.store_id in other_stores(session, self._store_id):
                return misplaced(marker)
        return (
            f"the store says that it is number {marker.store_id} of this catalog's stores, and this database has no "
            "such number: it went back to an older state. Run `holdfast catalog check`, then `holdfast stores claim`"
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lets this thread write all the same: for the probe, and for the marker that says whose the store is."""
        self._opened.by_this_thread = True
        try:
            yield
        finally:
            self._opened.by_this_thread = False
