"""Fetches chunks of a checkpoint, several at once, each proven by its SHA-256 before anyone sees it."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from holdfast_client.chunks.download import get_chunk
from holdfast_client.chunks.host_chunks import HostChunks
from holdfast_client.chunks.workers import Done, Jobs, TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    ChunkCorrupt,
    ChunkLost,
    DirectFileRefused,
    HoldfastError,
    IntegrityError,
    ServiceUnavailable,
    StoreRefused,
    TicketExpired,
    TicketProblem,
    TransferStopped,
    UnexpectedReply,
)
from holdfast_client.transport import check_stop
from holdfast_protocol.base import text_to_keep
from holdfast_protocol.checkpoints import MAX_CHUNK_BYTES, ReadChunks, ReadTicket, ReportChunk
from holdfast_protocol.states import StoreRole

# How long a ticket may be used, counted on this machine's monotonic clock (rule database-clock).

USED_PART = 0.9
"""A transfer that begins in the last tenth of a ticket's life could end after it."""

WAITS_PER_CHUNK = 20
"""How often a chunk may miss its turn. More often, and the tickets are dead when they come."""


class TicketWaitedTooLong(TicketExpired):
    """Its turn came too late. Nobody has refused anything, so this is no reason to give up."""


class TicketLife:
    def __init__(self, expires_in_seconds: int) -> None:
        self._ends = time.monotonic() + expires_in_seconds * USED_PART

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around a transfer. Raises TicketWaitedTooLong if it begins or is refused when the time is over; in a store
        that is slow or away a ticket dies between two tries, and that says nothing against the next one."""
        self._check()
        try:
            yield
        except TicketProblem:
            self._check()
            raise

    def _check(self) -> None:
        if time.monotonic() >= self._ends:
            raise TicketWaitedTooLong("The ticket's time was over before its turn came")


# Fetches chunks of a checkpoint, several at once, each proven by its SHA-256 before anyone gets to see it.
#
#     digest -> [ticket, under a lease] -> [GET on a thread] -> bytes that are proven
#                  ^-- expired ticket -----------'  '--> corrupt: [report] -> readable: once more, over HTTP
#                                                                          -> not readable: ChunkLost
#
# Memory is taken for a chunk only if the size that its ticket names is what the checkpoint's layout says. A few tickets
# are asked for at a time: signed all up front, the last ones would be dead when their turn comes. Where a store does
# not answer and another has the chunk, the next tickets are for that one. What the host has already (host_chunks.py)
# needs no ticket. A file of a mounted store is read where it is: the host's processes share it, and the kernel's copy
# of it, without our doing.

log = logging.getLogger("holdfast.client")

TICKETS_AT_ONCE = 64
TICKETS_PER_CHUNK = 4
_RENEW_LEASE_AT = 0.5
ELSEWHERE_AFTER_SECONDS = 2.0
"""How long a transfer is tried again where another store has the chunk too."""

Receive = Callable[[str, memoryview], None]

_Fill = Callable[[memoryview], None]
"""Fills a buffer that is as long as the chunk, and proves it."""
_Deliver = Callable[[str, int, _Fill], None]
_Fits = Callable[[str, int], bool]
"""Whether a chunk may have so many bytes."""


class _NotOnHostError(Exception):
    """What the host had under the chunk's name was not the chunk."""


class ShardFetcher:
    """For one checkpoint; may fetch several times under one lease, one fetch at a time. `close` ends the lease.

    `workers` are shared with other transfers; without them it starts its own and ends them in `close`. After a fetch
    that failed it can only be closed.
    """

    def __init__(self, client: Client, checkpoint_id: str, *, workers: TransferWorkers | None = None) -> None:
        self._client = client
        self._checkpoint_id = checkpoint_id
        self._workers = workers if workers is not None else TransferWorkers()
        self._owns_workers = workers is None
        self._buffers: queue.LifoQueue[bytearray] = queue.LifoQueue()
        self._stop = threading.Event()
        self._lease_id: str | None = None
        self._told_unprotected = False
        self._renew_lease_at = 0.0
        self._avoided: list[StoreRole] = []
        self._stop_of_store: dict[StoreRole, threading.Event] = {}
        self._lock = threading.Lock()
        self._bytes_from: Counter[StoreRole] = Counter()

    @property
    def bytes_from(self) -> dict[StoreRole, int]:
        """Of the chunks that came by a ticket, by the store that gave them."""
        with self._lock:
            return dict(self._bytes_from)

    def stop(self) -> None:
        """From any thread: the fetch ends with TransferStopped, within a block or a socket's time-out."""
        self._stop.set()
        for stop in list(self._stop_of_store.values()):
            stop.set()

    def fetch(
        self,
        digests: Iterable[str],
        on_chunk: Receive,
        into: Mapping[str, memoryview] | None = None,
        host: HostChunks | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        most_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        """Calls `on_chunk(digest, bytes)` once per distinct digest, on the transfer threads, several at a time, begun
        in the order of `digests`. The view is reused when the call returns: copy what you keep. What it raises ends
        the fetch. A chunk with a buffer in `into` of just its size arrives in that one, which nobody may believe
        before. What `host` has is taken from there, and what it shares is fetched by one process of the host.
        `sizes` are the chunks' bytes, as far as the caller knows them; `most_bytes` is what any other may have.

        Raises ChunkLost if no copy could be read, IntegrityError if a ticket names another size. When this returns or
        raises, no thread works for it any more.
        """

        def deliver(digest: str, size: int, fill: _Fill) -> None:
            own = into.get(digest) if into else None
            if own is not None and own.nbytes == size:
                fill(own)
                on_chunk(digest, own)
                return
            buffer = self._borrow(size)
            try:
                view = memoryview(buffer)[:size]
                fill(view)
                on_chunk(digest, view)
            finally:
                self._buffers.put(buffer)

        known = sizes or {}
        self._fetch(digests, deliver, host, lambda digest, size: known.get(digest, size) == size <= most_bytes)

    def close(self) -> None:
        """Ends the lease and the threads. A lease that cannot be ended runs out by itself."""
        if self._owns_workers:
            self._workers.close()
            self._owns_workers = False
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is not None:
            try:
                self._client.restores.release(lease_id)
            except HoldfastError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, digests: Iterable[str], deliver: _Deliver, host: HostChunks | None, fits: _Fits) -> None:
        jobs: Jobs[str, None] = Jobs(self._stop)
        waiting = deque(dict.fromkeys(digests))
        refused: Counter[tuple[str, bool]] = Counter()
        over_http: set[str] = set()
        not_on_host: set[str] = set()
        running: set[str] = set()
        tickets: dict[str, ReadTicket] = {}
        threads = self._workers.transfers
        try:
            while waiting or running:
                check_stop(self._stop)
                # Asked for while each thread has another chunk to go on with: the round trip stops none of them.
                if waiting and len(running) <= 2 * threads.count:
                    batch = _next_few(waiting, over_http)
                    running.update(batch)
                    for digest in list(batch):
                        size = host.size(digest) if host is not None and digest not in not_on_host else None
                        if host is not None and size is not None and fits(digest, size):
                            batch.remove(digest)
                            jobs.start(threads, digest, functools.partial(self._take, host, deliver, digest, size))
                    for ticket in self._read(batch, with_mount=batch[0] not in over_http) if batch else ():
                        if ticket.kind != "gone" and not fits(ticket.digest, ticket.bytes):
                            raise IntegrityError(
                                f"Chunk {ticket.digest[:12]} has {ticket.bytes} bytes, which is not what its "
                                "checkpoint's layout says"
                            )
                        tickets[ticket.digest] = ticket
                        life = TicketLife(ticket.expires_in_seconds)
                        jobs.start(
                            threads, ticket.digest, functools.partial(self._receive, ticket, life, deliver, host)
                        )
                done = jobs.next(timeout_seconds=self._until_renewal())
                if done is None:
                    self._renew_lease(next(iter(running)))
                    continue
                running.discard(done.key)
                if isinstance(done.error, _NotOnHostError):
                    not_on_host.add(done.key)
                    waiting.append(done.key)
                elif done.error is not None:
                    if not self._goes_elsewhere(tickets.get(done.key), done.error):
                        self._mend(done, done.error, refused, over_http)
                    waiting.append(done.key)
        except BaseException:
            self.stop()
            jobs.drain()
            raise

    def _take(self, host: HostChunks, deliver: _Deliver, digest: str, size: int) -> None:
        def fill(buffer: memoryview) -> None:
            if not host.take(digest, buffer, self._stop):
                raise _NotOnHostError

        deliver(digest, size, fill)

    def _receive(self, ticket: ReadTicket, life: TicketLife, deliver: _Deliver, host: HostChunks | None) -> None:
        if ticket.kind == "gone":
            raise ChunkCorrupt(ticket.digest, "missing", "the service has no readable copy")
        stop = self._stop_for(ticket)

        def get(buffer: memoryview) -> None:
            with life.used():
                get_chunk(
                    ticket,
                    buffer,
                    ticket.digest,
                    buffer.nbytes,
                    self._client.transfers.towards(ticket.store),
                    stop=stop,
                    retry_seconds=ELSEWHERE_AFTER_SECONDS if ticket.elsewhere else None,
                )
            with self._lock:
                self._bytes_from[ticket.store] += buffer.nbytes

        def fill(buffer: memoryview) -> None:
            if host is not None and ticket.kind == "http":
                host.fetch_once(ticket.digest, buffer, get, stop)
            else:
                get(buffer)

        deliver(ticket.digest, ticket.bytes, fill)

    def _until_renewal(self) -> float | None:
        """What comes from the host needs no lease."""
        return None if self._lease_id is None else max(0.05, self._renew_lease_at - time.monotonic())

    def _read(self, digests: list[str], *, with_mount: bool) -> list[ReadTicket]:
        asked_at = time.monotonic()
        reads = self._client.restores.read_chunks(
            self._checkpoint_id,
            ReadChunks(
                digests=digests,
                lease_id=self._lease_id,
                mount_proof=self._client.mount.proof() if with_mount else None,
                other_mount_proofs=self._client.mount.other_proofs() if with_mount else [],
                avoid_stores=self._avoided,
            ),
        )
        if reads.unprotected is not None and not self._told_unprotected:
            log.warning("reading %s without a lease: %s", self._checkpoint_id, reads.unprotected)
            self._told_unprotected = True
        self._lease_id = reads.lease_id
        self._renew_lease_at = asked_at + reads.lease_expires_in_seconds * _RENEW_LEASE_AT
        tickets = {ticket.digest: ticket for ticket in reads.chunks}
        if not tickets.keys() >= set(digests):
            raise UnexpectedReply("The service did not answer for every chunk that it was asked about")
        return [tickets[digest] for digest in digests]

    def _renew_lease(self, digest: str) -> None:
        """Transfers are slow: asking for any ticket again keeps the lease."""
        self._read([digest], with_mount=False)

    def _goes_elsewhere(self, ticket: ReadTicket | None, error: BaseException) -> bool:
        """Whether the chunk is to be had from another store, since this one does not answer."""
        if ticket is None or not ticket.elsewhere or not isinstance(error, ServiceUnavailable | TransferStopped):
            return False
        if isinstance(error, ServiceUnavailable) and ticket.store not in self._avoided:
            self._avoided.append(ticket.store)
            log.warning("the %s store does not answer (%s): reading from another one", ticket.store, error.detail)
            # Whoever else waits for it waits no longer.
            self._stop_of_store[ticket.store].set()
        return ticket.store in self._avoided and not self._stop.is_set()

    def _stop_for(self, ticket: ReadTicket) -> threading.Event:
        """What ends a transfer: that of its store, where the chunk is to be had from another one."""
        if not ticket.elsewhere:
            return self._stop
        stop = self._stop_of_store.setdefault(ticket.store, threading.Event())
        if self._stop.is_set():
            stop.set()
        return stop

    def _mend(
        self, done: Done[str, None], error: BaseException, refused: Counter[tuple[str, bool]], over_http: set[str]
    ) -> None:
        """Makes sense of a failed transfer: returns if it is to be tried with a new ticket, else raises. `refused`: how
        often by chunk and by whether its ticket had only waited too long."""
        if isinstance(error, TicketProblem | DirectFileRefused):
            if isinstance(error, DirectFileRefused):
                self._client.mount.give_up()
            waited = isinstance(error, TicketWaitedTooLong)
            refused[done.key, waited] += 1
            if refused[done.key, waited] >= (WAITS_PER_CHUNK if waited else TICKETS_PER_CHUNK):
                raise StoreRefused(f"No ticket could be used; the last time: {error.detail}") from error
        elif isinstance(error, ChunkCorrupt):
            verdict = self._client.restores.report_chunk(
                self._checkpoint_id,
                ReportChunk(digest=done.key, problem=error.problem, detail=text_to_keep(error.detail, 1000)),
            )
            if not verdict.readable:
                raise ChunkLost(done.key, verdict.detail, verdict.corrupt_checkpoints) from error
            if done.key in over_http:
                raise ChunkLost(
                    done.key,
                    f"the service reads it well, but it arrives here wrong twice ({error.detail}); "
                    "look at this machine's memory, network and mounts",
                    verdict.corrupt_checkpoints,
                ) from error
            over_http.add(done.key)
        else:
            raise error

    def _borrow(self, size_bytes: int) -> bytearray:
        """As many buffers as threads, kept between chunks: fresh pages cost more than the copy."""
        try:
            buffer = self._buffers.get_nowait()
        except queue.Empty:
            return bytearray(size_bytes)
        return buffer if len(buffer) >= size_bytes else bytearray(size_bytes)


def _next_few(waiting: deque[str], over_http: set[str]) -> list[str]:
    """Those that must go over HTTP are asked for by themselves, without the proof of the mount."""
    plain = waiting[0] not in over_http
    batch = [waiting.popleft()]
    while waiting and len(batch) < TICKETS_AT_ONCE and (waiting[0] not in over_http) == plain:
        batch.append(waiting.popleft())
    return batch
