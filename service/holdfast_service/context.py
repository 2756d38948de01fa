"""What every operation needs, made once at the start and handed down explicitly: no globals."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from holdfast_protocol.states import StoreRole
from holdfast_service.attached_stores.attached import AttachedStore, StoreWatch
from holdfast_service.auth.last_use import TokensUsed
from holdfast_service.copies.in_flight import TicketsInFlight
from holdfast_service.db.commit_notifier import CommitNotifier
from holdfast_service.db.engine import Database
from holdfast_service.identity.identities import Identities
from holdfast_service.insights.save_interval import SaveAdvice
from holdfast_service.load import Load
from holdfast_service.secrets.keyring import Keyring
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import Store
from holdfast_service.stores.read_rate_limit import ReadRateLimit


def _new_process_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class ServiceContext:
    """`epoch` is half of every fencing token, and with `claim` what a store's marker must say; `signing_key` signs the
    service's own URLs. `keyring` opens the secrets of the catalog's rows. `identities` verifies
    tokens of other issuers; None: none are taken.

    `store` is the primary store, the only one that trainers write to, and `store_id` its row in the catalog. `stores`
    are all that are attached, the primary one first. `read_rate_limit` is shared by all that reads copies back here,
    and `save_advice` by all that is told how often to save.
    `tickets` bounds those in flight, and `load` knows whether callers wait. `process_id` names this process to the
    others. `stopping` is set when it is asked to end: long background work ends after the step in hand.
    """

    settings: ServiceSettings
    database: Database
    store: Store
    store_id: int
    store_watch: StoreWatch
    catalog_id: str
    epoch: int
    claim: str
    signing_key: bytes = field(repr=False)
    notifier: CommitNotifier
    stores: tuple[AttachedStore, ...]
    read_rate_limit: ReadRateLimit
    save_advice: SaveAdvice
    identities: Identities | None = None
    keyring: Keyring = field(default_factory=Keyring, repr=False)
    tickets: TicketsInFlight = field(default_factory=TicketsInFlight)
    tokens_used: TokensUsed = field(default_factory=TokensUsed)
    load: Load = field(default_factory=Load)
    process_id: str = field(default_factory=_new_process_id)
    stopping: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def store_ids(self) -> tuple[int, ...]:
        return tuple(attached.store_id for attached in self.stores)

    def attached(self, role: StoreRole) -> AttachedStore | None:
        """The store with this role; None if the settings name none."""
        return next((attached for attached in self.stores if attached.role is role), None)

    def store_of(self, store_id: int) -> Store | None:
        """The opened store of a catalog row; None if this process does not have it."""
        return next((attached.store for attached in self.stores if attached.store_id == store_id), None)


async def _of(request: Request) -> ServiceContext:  # async: FastAPI calls the others on a thread
    context: ServiceContext = request.app.state.context
    return context


Context = Annotated[ServiceContext, Depends(_of)]
