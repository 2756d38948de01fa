"""What every operation needs, made once at the start and handed down explicitly: no globals. `Load`, `TicketsInFlight`
and `CommitNotifier` are the parts of it that only this process knows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState, CopyState, StoreRole
from holdfast_service.attached_stores.attached import AttachedStore, StoreWatch
from holdfast_service.auth.credentials import TokensUsed
from holdfast_service.db.dialect import database_now
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint, Copy, Project
from holdfast_service.errors import ProblemError
from holdfast_service.identity.identities import Identities
from holdfast_service.insights.save_interval import SaveAdvice
from holdfast_service.secrets.keyring import Keyring
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import Store
from holdfast_service.stores.read_rate_limit import ReadRateLimit

_log = logging.getLogger(__name__)

WAITS_FOR_STORE: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "holdfast_waits_for_store", default=nullcontext
)
"""Set by who lets calls in, for the work of one call."""


def waiting_for_store() -> AbstractContextManager[None]:
    """Around what a call's work asks a store: other calls are worked on meanwhile."""
    return WAITS_FOR_STORE.get()()


_MOST_CHECKPOINTS = 10_000
_SLICE_SECONDS = 0.5


class Load:
    """What one process knows of its callers: whether calls of training wait, which project a checkpoint belongs to, and
    how many samples each has made.

    Kept in memory by each process for itself, and relied on for fairness alone. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._projects: OrderedDict[str, str] = OrderedDict()
        self._samples: dict[str, deque[float]] = {}
        self._quiet = threading.Event()
        self._quiet.set()

    def set_busy(self, *, busy: bool) -> None:
        """Whether calls of training jobs wait for their turn."""
        if busy:
            self._quiet.clear()
        else:
            self._quiet.set()

    def yield_to_callers(self, most_seconds: float, stopping: threading.Event) -> None:
        """Returns as soon as no call of a training job waits, at the latest after that time, or when asked to stop."""
        ends = time.monotonic() + most_seconds
        while not stopping.is_set() and (left := ends - time.monotonic()) > 0:
            if self._quiet.wait(min(left, _SLICE_SECONDS)):
                return

    def note_checkpoint(self, checkpoint_id: str, project: str) -> None:
        with self._lock:
            self._projects[checkpoint_id] = project
            self._projects.move_to_end(checkpoint_id)
            if len(self._projects) > _MOST_CHECKPOINTS:
                self._projects.popitem(last=False)

    def project_of(self, checkpoint_id: str) -> str | None:
        """None: it was not begun in this process, or long ago."""
        with self._lock:
            return self._projects.get(checkpoint_id)

    def may_sample(self, owner: str, *, most: int, within_seconds: float) -> bool:
        """Whether the owner has made fewer samples of a store than `most` in that time; if so, it is one more."""
        now = time.monotonic()
        with self._lock:
            made = self._samples.setdefault(owner, deque())
            while made and made[0] < now - within_seconds:
                made.popleft()
            if len(made) >= most:
                return False
            made.append(now)
            return True


_COUNTED_AFTER = 16
_AGAIN_AFTER_SECONDS = 2.0
_RETRY_AFTER_SECONDS = 5


@dataclass
class _Known:
    in_flight: int = 0
    handed_out: int = 0
    """Since they were counted."""
    counted_at: float = float("-inf")


class TicketsInFlight:
    """How many tickets of a project are in flight: handed out, not expired, and their chunk not verified yet.

    The copies' rows say it, so it is the same for all processes and nothing can drift. They are counted seldom: a
    process counts once it has handed out a sixteenth of the limit since it counted last, so the limit is exceeded by
    about that much for each process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._projects: dict[str, _Known] = {}

    def hand_out(self, session: Session, project: Project, wanted: int, most: int) -> None:
        """Called before so many tickets are made. A project that has none in flight may have any number. Raises
        `rate_limited`."""
        with self._lock:
            known = self._projects.setdefault(project.id, _Known())
            full = known.in_flight + wanted > most and known.in_flight > 0
            stale = time.monotonic() - known.counted_at > _AGAIN_AFTER_SECONDS
            count = stale if full else (known.handed_out + wanted) * _COUNTED_AFTER > most
        in_flight = _in_flight(session, project.id, most) if count else None
        with self._lock:
            if in_flight is not None:
                known.in_flight, known.handed_out, known.counted_at = in_flight, 0, time.monotonic()
            if known.in_flight + wanted > most and known.in_flight > 0:
                raise ProblemError(
                    ProblemCode.RATE_LIMITED,
                    f"{known.in_flight} chunks of the project {project.name!r} are being sent, and "
                    f"HOLDFAST_PROJECT_TICKETS allows {most}. Try again in {_RETRY_AFTER_SECONDS} s.",
                    limit="HOLDFAST_PROJECT_TICKETS",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            known.handed_out += wanted


def _in_flight(session: Session, project_id: str, most: int) -> int:
    """No more than `most` are counted."""
    pending = (
        select(Copy.id)
        .where(
            Copy.project_id == project_id,
            Copy.state == CopyState.PENDING,
            Copy.ticket_expires_at > database_now(session),
        )
        .limit(most)
    )
    return session.execute(select(func.count()).select_from(pending.subquery())).scalar_one()


_NOTIFIER_THREADS = 2
"""Threads of its own: those that all of a loop share move the objects of a posix store, and a mount that hangs keeps
them. A thousand ranks that begin to wait must not use up the database's connections either."""


class CommitNotifier:
    """Wakes those who wait for a checkpoint to leave `uploading` (rule waiting-holds-nothing). `wait` is called on the
    event loop, `notify` from any thread.

    A waiter is a future on the event loop: it holds no thread and no session, so that any number of them never delays a
    seal. A commit in this process wakes its waiters at once; one poller task asks the database for the states of all
    awaited checkpoints together, so that another process's commit wakes them too."""

    def __init__(self, database: Database, *, poll_interval_seconds: float = 0.5) -> None:
        self._database = database
        self._poll_interval_seconds = poll_interval_seconds
        self._readers = ThreadPoolExecutor(_NOTIFIER_THREADS, thread_name_prefix="holdfast-commits")
        self._lock = threading.Lock()
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._poller: asyncio.Task[None] | None = None

    async def wait(self, checkpoint_id: str, timeout_seconds: float) -> None:
        """Returns as soon as the checkpoint is not `uploading` any more, and after the time-out at the latest."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiters.setdefault(checkpoint_id, set()).add(woken)
        try:
            # Registered first, asked second: a commit in between wakes, an earlier one is seen here.
            if await loop.run_in_executor(self._readers, self._settled, [checkpoint_id]):
                return
            self._ensure_poller(loop)
            await asyncio.wait([woken], timeout=timeout_seconds)
        finally:
            self._forget(checkpoint_id, woken)

    def notify(self, checkpoint_id: str) -> None:
        """To be called after the transaction that settled it has committed. Thread-safe; costs nothing unawaited."""
        with self._lock:
            waiters = self._waiters.pop(checkpoint_id, set())
        for woken in waiters:
            try:
                woken.get_loop().call_soon_threadsafe(_wake, woken)
            except RuntimeError:  # its loop has closed: no request waits there any more
                continue

    @property
    def waiting(self) -> int:
        """How many waiters there are now."""
        with self._lock:
            return sum(map(len, self._waiters.values()))

    def _forget(self, checkpoint_id: str, woken: asyncio.Future[None]) -> None:
        with self._lock:
            others = self._waiters.get(checkpoint_id)
            if others is not None:
                others.discard(woken)
                if not others:
                    del self._waiters[checkpoint_id]

    def _ensure_poller(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._poller is None or self._poller.done() or self._poller.get_loop() is not loop:
            self._poller = loop.create_task(self._poll(), name="holdfast-commit-poller")

    async def _poll(self) -> None:
        """Lives as long as a request waits."""
        while True:
            await asyncio.sleep(self._poll_interval_seconds)
            with self._lock:
                awaited = list(self._waiters)
            if not awaited:
                return
            try:
                settled = await asyncio.get_running_loop().run_in_executor(self._readers, self._settled, awaited)
            except ProblemError as problem:
                _log.warning("cannot ask for awaited checkpoints: %s", problem.detail)
                continue
            for checkpoint_id in settled:
                self.notify(checkpoint_id)

    def _settled(self, checkpoint_ids: Sequence[str]) -> list[str]:
        with self._database.read(in_transaction=False) as session:
            uploading = set(
                session.scalars(
                    select(Checkpoint.id).where(
                        Checkpoint.id.in_(checkpoint_ids), Checkpoint.state == CheckpointState.UPLOADING
                    )
                )
            )
        return [checkpoint_id for checkpoint_id in checkpoint_ids if checkpoint_id not in uploading]


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


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
