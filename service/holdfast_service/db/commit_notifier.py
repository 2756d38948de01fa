"""Wakes those who wait for a checkpoint to leave `uploading` (rule waiting-holds-nothing).

One notifier per process. A waiter is a future on the event loop: it holds no thread and no session, so that any number
of them never delays a seal. A commit in this process wakes its waiters at once; one poller task asks the database for
the states of all awaited checkpoints together, so that another process's commit wakes them too.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import select

from holdfast_protocol.states import CheckpointState
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Checkpoint
from holdfast_service.errors import ProblemError

_READERS = 2
"""Threads of its own: those that all of a loop share move the objects of a posix store, and a mount that hangs keeps
them. A thousand ranks that begin to wait must not use up the database's connections either."""

_log = logging.getLogger(__name__)


class CommitNotifier:
    """`wait` is called on the event loop, `notify` from any thread."""

    def __init__(self, database: Database, *, poll_interval_seconds: float = 0.5) -> None:
        self._database = database
        self._poll_interval_seconds = poll_interval_seconds
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="holdfast-commits")
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
