"""The processes of the service: what each has attached, that it is alive, and the leases of its passes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Literal

import structlog
from sqlalchemy import and_, delete, exists, func, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.events import EventType
from holdfast_protocol.states import CopyState, StoreRole
from holdfast_service.attached_stores.attached import SETTING_OF_ROLE
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database, if_writable
from holdfast_service.db.tables.core import Copy, Store
from holdfast_service.db.tables.operations import Controller, Worker
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import announce
from holdfast_service.release import VERSION

# The processes of the service, as each says of itself: registered at its start, seen again and again, and gone.
#
# Silence says that a process was killed, cut off, or hangs. Nothing relies on it but what people are shown, and the
# reaper: while no process serves, no rank can call (rule database-clock).

ProcessKind = Literal["serve", "worker"]

SILENT_AFTER = timedelta(seconds=45)
"""A process says so every ten seconds at least."""
_FORGOTTEN_AFTER = timedelta(days=1)


def say_alive(
    session: Session,
    process_id: str,
    kind: ProcessKind,
    stores: Mapping[str, int],
    unavailable: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """The first time, and again after a day of sleep, it makes the row. `stores` are those attached, by role;
    `unavailable` those that it cannot use, by id."""
    now = database_now(session)
    seen = (
        update(Worker)
        .where(Worker.id == process_id)
        .values(seen_at=now, unavailable=dict(unavailable))
        .returning(Worker.id)
    )
    if session.scalar(seen, execution_options={"synchronize_session": False}) is None:
        row = {
            "id": process_id,
            "kind": kind,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": VERSION,
            "started_at": now,
            "seen_at": now,
            "stores": dict(stores),
            "done": {},
            "unavailable": dict(unavailable),
        }
        insert_absent(session, Worker, [row])
        _forget_the_long_gone(session, now)


def say_goodbye(session: Session, process_id: str) -> None:
    now = database_now(session)
    session.execute(update(Worker).where(Worker.id == process_id).values(seen_at=now, ended_at=now))


def last_served_at(session: Session) -> datetime | None:
    """When a process that serves was last heard of; None if none has ever said so."""
    return session.scalar(select(func.max(Worker.seen_at)).where(Worker.kind == "serve"))


def _forget_the_long_gone(session: Session, now: datetime) -> None:
    """But for the last one that served: the reaper must know since when none does."""
    newest = select(Worker.id).where(Worker.kind == "serve").order_by(Worker.seen_at.desc()).limit(1)
    session.execute(
        delete(Worker).where(Worker.seen_at < now - _FORGOTTEN_AFTER, Worker.id.not_in(newest)),
        execution_options={"synchronize_session": False},
    )


# Which stores each process of a catalog has attached: asked where one says that it is alive, and by /readyz.
#
# Every process is to have the same. One that lacks a store cannot read what is only there: it repairs nothing from it,
# sends no reader to it, and does not find what is bad in it. That costs and is said, but refuses nothing.

_REMEDY = "Give every process of a catalog the same stores."


def attached_here(context: ServiceContext) -> dict[str, int]:
    """The stores' rows, by role."""
    return {attached.role.value: attached.store_id for attached in context.stores}


def weaknesses_of(context: ServiceContext) -> list[str]:
    """A sentence for each thing that an attached store does not enforce, and should."""
    return [
        f"{SETTING_OF_ROLE[attached.role]}: {told}"
        for attached in context.stores
        if attached.store.capabilities is not None
        for told in attached.store.capabilities.weaknesses
    ]


def what_differs(session: Session, context: ServiceContext) -> list[str]:
    """A sentence for each setting that another process which is alive has otherwise, and for each store with copies
    that none of them has. Empty where all is the same. It names no process: /readyz is open."""
    own = attached_here(context)
    others = session.scalars(
        select(Worker.stores).where(
            Worker.id != context.process_id,
            Worker.ended_at.is_(None),
            Worker.seen_at > database_now(session) - SILENT_AFTER,
        )
    ).all()
    told = []
    for role in StoreRole:
        here, setting = own.get(role.value), SETTING_OF_ROLE[role]
        if all(other.get(role.value) == here for other in others):
            continue
        if here is None:
            told.append(f"{setting} is not set here, but for another process. {_REMEDY}")
        elif any(other.get(role.value) not in (here, None) for other in others):
            told.append(f"{setting} names another store than for another process. {_REMEDY}")
        else:
            told.append(f"{setting} is set here, but not for another process. {_REMEDY}")
    attached = {store_id for stores in (own, *others) for store_id in stores.values()}
    return told + [
        f"No process has store {store_id} of the catalog attached, and copies are in it. They count as there while "
        "no process reads them: attach it again."
        for store_id in _holding_copies(session, attached)
    ]


def _holding_copies(session: Session, attached: set[int]) -> list[int]:
    there = exists().where(Copy.store_id == Store.id, Copy.state.in_((*KEPT, CopyState.SUSPECT)))
    query = select(Store.id).where(Store.id.not_in(attached), there).order_by(Store.id)
    return list(session.scalars(query))


# Whether a store can be used, as all processes together see it: each says so of itself where it says that it is alive,
# and not in a pass that asks the stores, which hangs with a mount that hangs. A store that one machine alone cannot
# reach does not come and go with the others' passes.


def unavailable_here(context: ServiceContext) -> dict[str, str]:
    """By the store's id, its role. A short silence is none."""
    least = context.settings.store_unavailable_seconds
    return {
        str(attached.store_id): attached.role.value
        for attached in context.stores
        if attached.watch.unavailable_seconds >= least and attached.watch.unavailable
    }


def announce_stores(database: Database) -> None:
    """Tells that a store cannot be used, once a living process says so; and that it is back, once none does. What was
    told stands in the store's row, so it is told once, by whichever process finds it."""
    with database.read() as session:
        differs = _stores_to_tell(session)
    _announce(database, differs)


def _announce(database: Database, store_ids: Collection[int]) -> None:
    for store_id in store_ids:
        with database.transaction() as session:
            row = select(Store).where(Store.id == store_id).with_for_update(key_share=True)
            store = session.execute(row).scalar_one()
            if store_id not in (now_differs := _stores_to_tell(session)):
                continue  # another process has told it
            role = now_differs[store_id]
            event = EventType.STORE_AVAILABLE if role is None else EventType.STORE_UNAVAILABLE
            told_as, store.unavailable_as = role or store.unavailable_as, role
            announce(session, event, None, database_now(session), project_id=None, store=StoreRole(str(told_as)))


def _stores_to_tell(session: Session) -> dict[int, str | None]:
    """The stores of which another thing was told last: with the role of one that cannot be used now, None for one that
    is back."""
    living = and_(Worker.ended_at.is_(None), Worker.seen_at > database_now(session) - SILENT_AFTER)
    said = {
        int(store_id): role
        for each in session.scalars(select(Worker.unavailable).where(living))
        for store_id, role in each.items()
    }
    told = dict(session.execute(select(Store.id, Store.unavailable_as)).all())
    return {
        store_id: said.get(store_id)
        for store_id, told_as in told.items()
        if (store_id in said) != (told_as is not None)
    }


# Says in the catalog that this process is alive, and renews the leases of the passes that are under way in it.
# It warns where the processes do not all have the same stores.
#
# A process that is killed falls silent, and its leases run out.

_log = structlog.get_logger("holdfast.presence")

_EVERY_SECONDS = 10.0
# A lease survives two renewals that fail.
_PER_LEASE = 3


class Presence:
    """Enter once, leave once; `keep` from any thread."""

    def __init__(self, context: ServiceContext, kind: ProcessKind) -> None:
        self._context = context
        self._kind = kind
        self._lock = threading.Lock()
        self._leases: set[str] = set()
        self._told: list[str] = []
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-presence", daemon=True)

    def enter(self) -> None:
        """Raises ProblemError if the database is unavailable."""
        with if_writable("that this process is alive"):
            self._say()
        self._thread.start()

    def leave(self) -> None:
        """A database that is unavailable hears nothing; to the others this process has fallen silent then."""
        self._leaving.set()
        if self._thread.ident is not None:
            self._thread.join(_EVERY_SECONDS)
        try:
            self._context.tokens_used.write_down(self._context.database)
            with self._context.database.transaction() as session:
                say_goodbye(session, self._context.process_id)
        except ProblemError as error:
            _log.warning("not_said", error=error.detail)

    @contextmanager
    def keeping(self, lease_token: str | None) -> Iterator[None]:
        """The lease is renewed while the block is under way."""
        if lease_token is None:
            yield
            return
        with self._lock:
            self._leases.add(lease_token)
        try:
            yield
        finally:
            with self._lock:
                self._leases.discard(lease_token)

    def _run(self) -> None:
        pause = min(_EVERY_SECONDS, self._context.settings.lease_seconds / _PER_LEASE)
        while not self._leaving.wait(pause):
            try:
                self._say()
            except ProblemError as error:
                _log.warning("not_said", error=error.detail)
            except Exception:
                _log.exception("not_said")

    def _say(self) -> None:
        with self._lock:
            leases = sorted(self._leases)
        with self._context.database.transaction() as session:
            if leases:  # before the process's own row: a pass that is noted locks them in this order too
                for token in leases:
                    lease.renew(session, Controller, token, seconds=self._context.settings.lease_seconds)
            here, unavailable = attached_here(self._context), unavailable_here(self._context)
            say_alive(session, self._context.process_id, self._kind, here, unavailable)
        with self._context.database.read() as session:
            to_tell, differs = _stores_to_tell(session), what_differs(session, self._context)
        _announce(self._context.database, to_tell)
        self._context.tokens_used.write_down(self._context.database)
        if differs != self._told:
            for sentence in differs:
                _log.warning("stores_differ", reason=sentence)
            self._told = differs
