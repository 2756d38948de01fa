"""New events, read once in a process for all who follow them.

A follower has its position in the stream and no queue, so a slow reader costs no memory of its own. What is new lies in
one list in memory; who has fallen behind it reads on in the database. So nobody is left out, and a follower that comes
to another process, with its position, goes on there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor

from holdfast_service.db.engine import Database
from holdfast_service.errors import ProblemError
from holdfast_service.events.numbering import number_new
from holdfast_service.events.reading import EventFilter, NumberedEvent, Read, read_after

_KEPT = 5000
_AT_ONCE = 500
_READERS = 2
"""Threads for followers that have fallen behind: a crowd of them must not use up the database's connections."""
_EVERYTHING = EventFilter()

_log = logging.getLogger(__name__)


class EventFeed:
    """One per application. `after` is called on an event loop; there may be several of them. The thread that asks for
    new events lives as long as somebody follows."""

    def __init__(self, database: Database, epoch: int, *, poll_interval_seconds: float = 0.5) -> None:
        self._database = database
        self._epoch = epoch
        self._poll_interval_seconds = poll_interval_seconds
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="holdfast-events")
        self._lock = threading.Lock()
        # The newest events, in their order: all with a number above the first and up to the second of the two. None
        # while nobody reads them.
        self._newest: list[NumberedEvent] = []
        self._span: tuple[int, int] | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._polls = False

    async def after(self, number: int, wanted: EventFilter, timeout_seconds: float) -> Read:
        """The next events that are wanted, some hundreds at most; none if nothing happens in that time. Raises
        `events_forgotten` and `database_unavailable`."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_seconds
        while loop.time() < ends:
            woken: asyncio.Future[None] = loop.create_future()
            try:
                with self._lock:
                    self._waiters.add(woken)
                    self._ensure_poller()
                # Registered first, asked second: what comes in between wakes.
                found = self._in_memory(number, wanted)
                if found is None:
                    found = await self._in_catalog(number, wanted)
                if found.number > number:
                    return found
                await asyncio.wait([woken], timeout=max(ends - loop.time(), 0))
            finally:
                with self._lock:
                    self._waiters.discard(woken)
        return await self._in_catalog(number, wanted)

    async def _in_catalog(self, number: int, wanted: EventFilter) -> Read:
        def read() -> Read:
            return read_after(self._database, self._epoch, number, wanted, limit=_AT_ONCE)

        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def _in_memory(self, number: int, wanted: EventFilter) -> Read | None:
        """None: what follows is not all in memory."""
        with self._lock:
            if self._span is None or not self._span[0] <= number <= self._span[1]:
                return None
            first = bisect_right(self._newest, number, key=lambda event: event.number)
            events = self._newest[first : first + _AT_ONCE]
            to = events[-1].number if len(events) == _AT_ONCE else self._span[1]
        return Read([event for event in events if wanted.takes(event)], to)

    def _ensure_poller(self) -> None:
        if not self._polls:
            threading.Thread(target=self._poll, name="holdfast-event-poller", daemon=True).start()
            self._polls = True

    def _poll(self) -> None:
        silent = False
        pause = threading.Event()
        while True:
            try:
                while self._read_new():
                    self._wake_all()
                silent = False
            except Exception as error:
                if not silent:
                    said = error.detail if isinstance(error, ProblemError) else error
                    _log.warning("cannot ask for new events: %s", said, exc_info=not isinstance(error, ProblemError))
                silent = True
            pause.wait(self._poll_interval_seconds)
            with self._lock:
                if not self._waiters:
                    # To read all that comes until somebody follows again could take long.
                    self._newest, self._span, self._polls = [], None, False
                    return

    def _read_new(self) -> bool:
        """Whether there was anything. Only the poller changes what is in memory."""
        last, span = number_new(self._database), self._span
        if span is None or last < span[1]:  # the database went back: followers find that out there
            with self._lock:
                self._newest, self._span = [], (last, last)
            return True
        if last == span[1]:
            return False
        read = read_after(self._database, self._epoch, span[1], _EVERYTHING, limit=_AT_ONCE)
        with self._lock:
            kept = [*self._newest, *read.events]
            self._newest = kept[-_KEPT:]
            begins = kept[-_KEPT - 1].number if len(kept) > _KEPT else span[0]
            self._span = (begins, read.number)
        return True

    def _wake_all(self) -> None:
        with self._lock:
            waiters = list(self._waiters)
        for woken in waiters:
            try:
                woken.get_loop().call_soon_threadsafe(_wake, woken)
            except RuntimeError:  # its loop has closed: no request waits there any more
                continue


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
