"""A store that this process has opened: its role, whether it answers now, and proofs that clients see its mount."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast_protocol.checkpoints import MountProofOffer
from holdfast_service.stores.base import MountedStore

if TYPE_CHECKING:
    from holdfast_service.context import ServiceContext

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from holdfast_protocol.states import StoreRole
from holdfast_service.attached_stores.ownership import (
    ForeignStoreError,
    Ownership,
    misplaced,
    other_stores,
    probe_again,
    read_marker,
    settle,
)
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import CatalogIdentity
from holdfast_service.errors import ProblemError
from holdfast_service.records.history import KeptMemory
from holdfast_service.records.scanning import NewerRecords
from holdfast_service.stores.base import Store, StoreError, StoreUnavailable

_log = structlog.get_logger("holdfast.store")

PROBE_EVERY_SECONDS = 86400.0
_PROBE_RETRY_SECONDS = 600.0
_FRESH_SECONDS = 10.0
_DOUBTED_FRESH_SECONDS = 1.0
_ANSWERS_WITHIN_SECONDS = 5.0
_TAKES_LONG = "The store takes long to answer."


class StoreWatch:
    """One per process: asks for a store that was unavailable at the start until it answers, and knows whether it
    answers now (rule store-outage-degrades). `problem` is None once the store was probed, or known from before, and is
    this catalog's. `foreign`: why it must take no upload, as far as is known: it is another catalog's, or another of
    this one's.

    If another store has the same chunks, a reader must not wait for this one's time-out each time: the last answer is
    kept for a few seconds, and while one caller asks, the others use what was known.
    """

    def __init__(self, database: Database, store: Store, store_id: int, identity: CatalogIdentity) -> None:
        self._database = database
        self._store = store
        self._store_id = store_id
        self._identity = identity
        self.ownership = Ownership(database, store, store_id, identity)
        self.newer_records = NewerRecords(database, store, identity.epoch)
        self.kept_memory = KeptMemory(database, store, identity)
        store.guard_changes(self.ownership)
        self._lock = threading.Lock()
        self.problem: str | None = "The store was not asked yet."
        self.foreign: str | None = None
        self._asking = threading.Lock()
        self._asking_since: float | None = None
        self._asked_at: float | None = None
        self._silent: str | None = None
        self._silent_since: float | None = None
        self._hung = False
        """The last question had no answer, and not at once."""
        self._doubted = False
        self._probed_at = float("-inf")
        self.not_probed: str | None = None
        """Why what the store enforces was not found out, if the last `reconcile` has tried."""

    def settle(self) -> None:
        """Raises ForeignStoreError; a store that is unavailable leaves its reason in `problem`."""
        with self._lock:
            if self.problem is None:
                return
            try:
                with self.ownership.opened():
                    settle(self._database, self._store, self._store_id, self._identity)
            except StoreError as error:
                self.problem = f"The store does not answer: {error}"
                _log.warning("store_unavailable", reason=str(error))
            except ForeignStoreError as error:
                self.problem = self.foreign = str(error)
                _log.error("store_refused", reason=str(error))
                raise
            else:
                self.problem = self.foreign = None

    def reconcile(self) -> str | None:
        """A pass of background work: asks the store, and after the start and once a day what it enforces. Why it is
        unavailable, None if it is not."""
        self._ask()
        self.not_probed = None
        if self._silent is None and time.monotonic() - self._probed_at > PROBE_EVERY_SECONDS:
            self._probe_again()
        return self._silent

    def check(self) -> str | None:
        """For /readyz: None if the store answers at this moment, else why not. While another caller asks a store that
        hangs, this one waits shortly or not at all: else each probe that comes would keep a thread."""
        asked = self._ask(wait_seconds=0 if self.unavailable else _ANSWERS_WITHIN_SECONDS)
        return self._silent if asked else self.reason

    def _probe_again(self) -> None:
        """A store that was upgraded, or stands behind another gateway, may enforce other things than it did."""
        self._probed_at = time.monotonic() - PROBE_EVERY_SECONDS + _PROBE_RETRY_SECONDS
        if not self.ownership.holds():
            return  # nothing may be written there now, samples included
        try:
            changed = probe_again(self._database, self._store, self._store_id)
        except (StoreError, ProblemError) as error:
            self.not_probed = str(error)
            _log.warning("store_not_probed", store_id=self._store_id, reason=self.not_probed)
            return
        self._probed_at = time.monotonic()
        for name, (was, now) in changed.items():
            _log.warning("store_changed", store_id=self._store_id, enforces=name, was=was, now=now)

    def refuse_foreign(self) -> None:
        """Before a job's bytes go there, or are taken for arrived. Sends no request. Raises StoreUnavailable: an
        operator must act, and the job's save waits for that."""
        if self.foreign is not None:
            raise StoreUnavailable(self.foreign)

    def refuse_hanging(self) -> None:
        """Before a call waits for the store. Sends no request. Raises StoreUnavailable: a call that hangs keeps its
        place, of which all calls share a few, and those that say that a job lives would wait behind it."""
        if self._hung or self._is_overdue:
            raise StoreUnavailable(_TAKES_LONG)

    def doubt(self) -> None:
        """A caller got no answer from the store: the service soon asks again."""
        self._doubted = True

    def refresh(self) -> None:
        """Asks the store if nothing is known that is fresh; at most one caller at a time waits for that. Never called
        inside a transaction."""
        fresh_seconds = _DOUBTED_FRESH_SECONDS if self._doubted else _FRESH_SECONDS
        if self._asked_at is None or time.monotonic() - self._asked_at > fresh_seconds:
            self._ask(wait_seconds=0)

    @property
    def unavailable(self) -> bool:
        """Whether the store is known not to answer. Sends no request."""
        return self._is_overdue or self.problem is not None or self._silent is not None

    @property
    def _is_overdue(self) -> bool:
        began = self._asking_since
        return began is not None and time.monotonic() - began > _ANSWERS_WITHIN_SECONDS

    @property
    def reason(self) -> str | None:
        """Why it is unavailable, as far as is known."""
        return self.problem or self._silent or (_TAKES_LONG if self.unavailable else None)

    @property
    def unavailable_seconds(self) -> float:
        """For how long it has not answered, as far as this process knows; 0 if it answers."""
        since = self._silent_since or self._asking_since
        return time.monotonic() - since if self.unavailable and since is not None else 0.0

    def _ask(self, *, wait_seconds: float = -1) -> bool:
        """False: another caller was asking for all of that time. Below zero: there is no limit to it."""
        if not self._asking.acquire(timeout=wait_seconds):
            return False
        try:
            self._asking_since = time.monotonic()
            self._silent = self._answer()
            self._hung = self._silent is not None and self._is_overdue
            if self._silent is None and self._silent_since is not None:
                _log.info("store_back", store_id=self._store_id)
                self._silent_since = None
            elif self._silent is not None and self._silent_since is None:
                _log.warning("store_silent", store_id=self._store_id, reason=self._silent)
                self._silent_since = self._asking_since
            self._asked_at = time.monotonic()
            self._doubted = False
            return True
        finally:
            self._asking_since = None
            self._asking.release()

    def _answer(self) -> str | None:
        with suppress(ForeignStoreError):
            self.settle()
        if self.problem is not None:
            return self.problem
        try:
            self._store.ping()
        except StoreError as error:
            return f"The store does not answer: {error}"
        self.foreign = self._misplaced()
        return self.foreign

    def _misplaced(self) -> str | None:
        """Whether another of the catalog's stores stands there now. Without its marker what was known counts."""
        with suppress(StoreError, ForeignStoreError, ProblemError):
            marker, identity = read_marker(self._store), self._identity
            if marker.store_id == self._store_id:
                return None
            with self._database.read() as session:
                others = other_stores(session, self._store_id)
            found = marker.is_of(others, identity.catalog_id, identity.epoch, identity.claim)
            return misplaced(marker) if found else None
        return self.foreign


SETTING_OF_ROLE = {
    StoreRole.PRIMARY: "HOLDFAST_STORE",
    StoreRole.SECOND: "HOLDFAST_SECOND_STORE",
    StoreRole.COLD: "HOLDFAST_COLD_STORE",
}


SHARED_PROOF_SECONDS = 1.0


class MountProofs:
    """Of one store. Those who ask within a second are offered one file: each call with a token would else make one, and
    a flood of them would use up the filesystem's inodes before the sweep takes them away. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offer: MountProofOffer | None = None
        self._made_at = float("-inf")

    def offer(self, store: MountedStore, seconds: int) -> MountProofOffer:
        """Raises StoreError."""
        with self._lock:
            shared_until = self._made_at + min(SHARED_PROOF_SECONDS, seconds / 10)
            if self._offer is None or time.monotonic() >= shared_until or not os.path.exists(self._offer.path or ""):
                proof_id, path = store.new_mount_proof(expires_in_seconds=seconds)
                self._offer = MountProofOffer(proof_id=proof_id, path=str(path), expires_in_seconds=seconds)
                self._made_at = time.monotonic()
            return self._offer


@dataclass(frozen=True)
class AttachedStore:
    """`store_id` is its row in the catalog; `watch` knows whether it is there and this catalog's."""

    role: StoreRole
    store: Store
    store_id: int
    watch: StoreWatch
    proofs: MountProofs = field(default_factory=MountProofs, compare=False, repr=False)


def ask_stores(context: ServiceContext) -> None:
    """Asks again if there are several: what is known of each must be fresh. Never called inside a transaction."""
    if len(context.stores) > 1:
        for attached in context.stores:
            attached.watch.refresh()


def offer_mount_proof(context: ServiceContext) -> MountProofOffer:
    """A fresh nonce on each mounted store's filesystem: a client that reads it back sees the same mount (rule
    drop-box). `path` is null if the primary store is not a mounted filesystem. Raises StoreError if it is the only
    store and does not answer; otherwise a reader goes on with the others."""
    ask_stores(context)
    seconds = context.settings.ticket_seconds
    alone = len(context.stores) == 1
    offers: dict[StoreRole, MountProofOffer] = {}
    unavailable = False
    for attached in context.stores:
        if not isinstance(attached.store, MountedStore):
            continue
        try:
            attached.watch.refuse_hanging()
            silent = attached.watch.unavailable and not alone
            offered = None if silent else attached.proofs.offer(attached.store, seconds)
        except StoreError:
            if alone:
                raise
            offered = None
        if offered is not None:
            offers[attached.role] = offered
        elif attached.role is StoreRole.PRIMARY:
            unavailable = True
    others = [offer for role, offer in offers.items() if role is not StoreRole.PRIMARY]
    nothing = MountProofOffer(proof_id=None, path=None, expires_in_seconds=seconds)
    return offers.get(StoreRole.PRIMARY, nothing).model_copy(update={"unavailable": unavailable, "others": others})
