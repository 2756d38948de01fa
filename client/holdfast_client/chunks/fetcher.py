"""Fetches chunks of a checkpoint, several at once, each proven by its SHA-256 before a reader sees it.

    digest -> [ticket, under a lease] -> [GET on a thread] -> proven bytes -> sink
                 ^-- expired ticket -----------'  '--> corrupt: [report] -> readable: once more, over HTTP
                                                                         -> not readable: ChunkLost
                                               wrong again, and readable -> ReadsWrongHere

Memory is taken for a chunk only if its ticket's size is the one in the checkpoint's layout. Tickets are asked
for a few at a time, because late ones of one large batch would expire before their turn. If a store does not
answer, or refuses, and another has the chunk, the next tickets are for that one. Chunks on the host (host_chunks.py)
need no ticket.
A file of a mounted store is read in place: the host's processes share it and the kernel's cache of it anyway. But if
other hosts want the chunk too, one host reads it and passes it on (peers.py).
"""

from __future__ import annotations

import functools
import logging
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast_client.chunks.connections import WAITS_PER_CHUNK, TicketLife, TicketWaitedTooLong
from holdfast_client.chunks.transfer import get_chunk
from holdfast_client.chunks.workers import Jobs, TransferWorkers
from holdfast_client.client import Client
from holdfast_client.errors import (
    ChunkCorrupt,
    ChunkLost,
    DirectFileRefused,
    HoldfastError,
    IntegrityError,
    ReadsWrongHere,
    ServiceUnavailable,
    StoreRefused,
    StoreUnavailable,
    TicketProblem,
    TransferStopped,
    UnexpectedReply,
)
from holdfast_client.transport import check_stop
from holdfast_protocol.base import text_to_keep
from holdfast_protocol.checkpoints import MAX_CHUNK_BYTES, ShardChunks
from holdfast_protocol.restores import ReadChunks, ReadTicket, ReportChunk
from holdfast_protocol.states import StoreRole

if TYPE_CHECKING:  # a command needs nothing of the agent and of other hosts
    from holdfast_client.chunks.host_chunks import HostChunks

Receive = Callable[[str, memoryview], None]

_Fill = Callable[[memoryview], None]
"""Fills a buffer that is as long as the chunk, and proves it."""


class Buffers:
    """One per thread, kept between chunks, because fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._free: queue.LifoQueue[bytearray] = queue.LifoQueue()

    def borrow(self, size_bytes: int) -> bytearray:
        """A buffer of at least this size."""
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            return bytearray(size_bytes)
        return buffer if len(buffer) >= size_bytes else bytearray(size_bytes)

    def give_back(self, buffer: bytearray) -> None:
        self._free.put(buffer)


class ChunkSink:
    """The destination of one fetch, as ShardFetcher.fetch describes it. Runs on the transfer threads."""

    def __init__(
        self,
        buffers: Buffers,
        on_chunk: Receive,
        into: Mapping[str, memoryview],
        sizes: Mapping[str, int],
        most_bytes: int,
    ) -> None:
        self._buffers = buffers
        self._on_chunk = on_chunk
        self._into = into
        self._sizes = sizes
        self._most_bytes = most_bytes

    def takes(self, digest: str, size: int) -> bool:
        """Whether the chunk may have so many bytes."""
        return self._sizes.get(digest, size) == size <= self._most_bytes

    def deliver(self, digest: str, size: int, fill: _Fill) -> None:
        """Delivers the chunk once `fill` has proven it."""
        own = self._into.get(digest)
        if own is not None and own.nbytes == size:
            fill(own)
            self._on_chunk(digest, own)
            return
        buffer = self._buffers.borrow(size)
        try:
            view = memoryview(buffer)[:size]
            fill(view)
            self._on_chunk(digest, view)
        finally:
            self._buffers.give_back(buffer)


log = logging.getLogger("holdfast.client")

_RENEW_LEASE_AT = 0.5


class TicketSource:
    """Tickets to read one checkpoint. Each request renews the lease, which keeps the checkpoint from being purged. For
    the scheduling thread alone. `close` ends the lease."""

    def __init__(self, client: Client, checkpoint_id: str) -> None:
        self._client = client
        self._checkpoint_id = checkpoint_id
        self._lease_id: str | None = None
        self._last_asked: str | None = None
        self._renew_lease_at = 0.0
        self._told_unprotected = False
        self._avoided: list[StoreRole] = []
        self.shard: int | None = None
        """The next request asks for this rank's chunk list too."""
        self.chunk_lists: dict[int, ShardChunks] = {}
        """Those that came along, by rank. An older service sends none."""

    def ask(self, digests: list[str], *, with_mount: bool) -> list[ReadTicket]:
        """A ticket for each, in this order. `with_mount`: it may name a file, if this machine sees the store's own
        mount."""
        asked_at = time.monotonic()
        reads = self._client.restores.read_chunks(
            self._checkpoint_id,
            ReadChunks(
                digests=digests,
                lease_id=self._lease_id,
                mount_proof=self._client.mount.proof() if with_mount else None,
                other_mount_proofs=self._client.mount.other_proofs() if with_mount else [],
                avoid_stores=self._avoided,
                shard=self.shard,
            ),
        )
        if reads.shard is not None:
            self.chunk_lists[reads.shard.rank] = reads.shard
        self.shard = None
        if reads.unprotected is not None and not self._told_unprotected:
            log.warning("reading %s without a lease: %s", self._checkpoint_id, reads.unprotected)
            self._told_unprotected = True
        self._lease_id, self._last_asked = reads.lease_id, digests[0]
        self._renew_lease_at = asked_at + reads.lease_expires_in_seconds * _RENEW_LEASE_AT
        tickets = {ticket.digest: ticket for ticket in reads.chunks}
        if not tickets.keys() >= set(digests):
            raise UnexpectedReply("The service did not answer for every chunk that it was asked about")
        return [tickets[digest] for digest in digests]

    def seconds_until_renewal(self) -> float | None:
        """None without a lease: chunks from the host need none."""
        return None if self._lease_id is None else max(0.05, self._renew_lease_at - time.monotonic())

    def renew(self, digest: str) -> None:
        """Keeps the lease during slow transfers, by asking for any ticket again."""
        self.ask([digest], with_mount=False)

    @property
    def is_due(self) -> bool:
        """Whether there is a lease, and half of its time is over."""
        return self._lease_id is not None and time.monotonic() >= self._renew_lease_at

    def renew_if_due(self) -> None:
        """Keeps the lease between transfers."""
        if self.is_due and self._last_asked is not None:
            self.renew(self._last_asked)

    def avoids(self, store: StoreRole) -> bool:
        return store in self._avoided

    def avoid(self, store: StoreRole) -> None:
        """The store does not answer, or refuses: the next tickets are for another store that has the chunk."""
        self._avoided.append(store)

    def close(self) -> None:
        """A lease that cannot be ended expires by itself."""
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is not None:
            with suppress(HoldfastError):
                self._client.restores.release(lease_id)


TICKETS_AT_ONCE = 64
TICKETS_PER_CHUNK = 4
ELSEWHERE_AFTER_SECONDS = 2.0
"""The retry deadline of a transfer if another store has the chunk too."""


class ChunkTransfers:
    """From the stores into a buffer, for the transfer threads: what ends them, and bytes by store."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.stopped = threading.Event()
        self._stop_of_store: dict[StoreRole, threading.Event] = {}
        self._lock = threading.Lock()
        self._bytes_from: Counter[StoreRole] = Counter()

    @property
    def bytes_from(self) -> dict[StoreRole, int]:
        with self._lock:
            return dict(self._bytes_from)

    def stop(self) -> None:
        self.stopped.set()
        for stop in list(self._stop_of_store.values()):
            stop.set()

    def stop_store(self, store: StoreRole) -> None:
        """Releases the threads that wait for this store while another one has the chunk."""
        self._stop_of_store[store].set()

    def fill(self, ticket: ReadTicket, life: TicketLife, host: HostChunks | None, buffer: memoryview) -> None:
        stop = self._stop_for(ticket)
        if ticket.kind == "file":
            self._client.mount.check_read(ticket.path)
        peers, agents = (None, None) if host is None else (host.peers, host.agents)

        def get(into: memoryview) -> None:
            if peers is not None and peers.take(ticket.digest, into, stop):
                return
            if agents is not None and agents.read_into(ticket.digest, into, stop):
                return
            with life.used():
                try:
                    get_chunk(
                        ticket,
                        into,
                        ticket.digest,
                        into.nbytes,
                        self._client.transfers.towards(ticket.store),
                        stop=stop,
                        retry_seconds=ELSEWHERE_AFTER_SECONDS if ticket.elsewhere else None,
                    )
                except StoreUnavailable as error:
                    if ticket.kind != "file" or ticket.elsewhere:
                        raise
                    # Where this machine's mount fails the service may reach the store all the same.
                    raise DirectFileRefused(error.detail) from error
            with self._lock:
                self._bytes_from[ticket.store] += into.nbytes

        passed_on = peers is not None and peers.have(ticket.digest)
        if host is not None and (ticket.kind == "http" or passed_on):
            host.fetch_once(ticket.digest, buffer, get, stop)
        else:
            get(buffer)

    def _stop_for(self, ticket: ReadTicket) -> threading.Event:
        """The event that ends a transfer: its store's, if another store has the chunk."""
        if not ticket.elsewhere:
            return self.stopped
        stop = self._stop_of_store.setdefault(ticket.store, threading.Event())
        if self.stopped.is_set():
            stop.set()
        return stop


class _NotOnHostError(Exception):
    """The host's bytes under the chunk's name are not the chunk."""


class FetchSchedule:
    """The next actions of one fetch: on the calling thread, which alone holds its state and calls the service."""

    def __init__(
        self,
        client: Client,
        checkpoint_id: str,
        digests: Iterable[str],
        *,
        source: TicketSource,
        transfers: ChunkTransfers,
        sink: ChunkSink,
        host: HostChunks | None,
        workers: TransferWorkers,
    ) -> None:
        self._client = client
        self._checkpoint_id = checkpoint_id
        self._source = source
        self._transfers = transfers
        self._sink = sink
        self._host = host
        self._threads = workers.transfers
        self._jobs: Jobs[str, None] = Jobs(transfers.stopped)
        self._waiting = deque(dict.fromkeys(digests))
        self._running: set[str] = set()
        self._tickets: dict[str, ReadTicket] = {}
        self._refused: Counter[tuple[str, bool]] = Counter()
        """How often each chunk was tried, by whether its ticket had only expired while it waited."""
        self._over_http: set[str] = set()
        self._not_on_host: set[str] = set()

    def run(self) -> None:
        """When this returns or raises, no thread works for it any more."""
        try:
            while self._waiting or self._running:
                check_stop(self._transfers.stopped)
                # Asked for while each thread still has another chunk, so that the call delays none of them.
                if self._waiting and len(self._running) <= 2 * self._threads.count:
                    self._start_next_few()
                done = self._jobs.next(timeout_seconds=self._source.seconds_until_renewal())
                if done is None:
                    self._source.renew(next(iter(self._running)))
                    continue
                self._running.discard(done.key)
                if done.error is not None:
                    self._mend(done.key, done.error)
                    self._waiting.append(done.key)
        except BaseException:
            self._transfers.stop()
            self._jobs.drain()
            raise

    def _start_next_few(self) -> None:
        batch = self._next_few()
        self._running.update(batch)
        for digest in list(batch):
            size = self._host.size(digest) if self._host is not None and digest not in self._not_on_host else None
            if self._host is not None and size is not None and self._sink.takes(digest, size):
                batch.remove(digest)
                self._jobs.start(self._threads, digest, functools.partial(self._take, self._host, digest, size))
        if not batch:
            return
        for ticket in self._source.ask(batch, with_mount=batch[0] not in self._over_http):
            if ticket.kind != "gone" and not self._sink.takes(ticket.digest, ticket.bytes):
                raise IntegrityError(
                    f"Chunk {ticket.digest[:12]} has {ticket.bytes} bytes, which is not the size that its "
                    "checkpoint's layout says"
                )
            self._tickets[ticket.digest] = ticket
            life = TicketLife(ticket.expires_in_seconds)
            self._jobs.start(self._threads, ticket.digest, functools.partial(self._receive, ticket, life))

    def _next_few(self) -> list[str]:
        """Chunks that must go over HTTP are asked for separately, without the proof of the mount."""
        plain = self._waiting[0] not in self._over_http
        batch = [self._waiting.popleft()]
        while self._waiting and len(batch) < TICKETS_AT_ONCE and (self._waiting[0] not in self._over_http) == plain:
            batch.append(self._waiting.popleft())
        return batch

    def _take(self, host: HostChunks, digest: str, size: int) -> None:
        def fill(buffer: memoryview) -> None:
            if not host.take(digest, buffer, self._transfers.stopped):
                raise _NotOnHostError

        self._sink.deliver(digest, size, fill)

    def _receive(self, ticket: ReadTicket, life: TicketLife) -> None:
        if ticket.kind == "gone":
            raise ChunkCorrupt(ticket.digest, "missing", "the service has no readable copy")
        fill = functools.partial(self._transfers.fill, ticket, life, self._host)
        self._sink.deliver(ticket.digest, ticket.bytes, fill)

    def _mend(self, digest: str, error: BaseException) -> None:
        """Handles a failed transfer: returns if it needs a new ticket, else raises."""
        if isinstance(error, _NotOnHostError):
            self._not_on_host.add(digest)
        elif self._goes_elsewhere(self._tickets.get(digest), error):
            return
        elif isinstance(error, TicketProblem | DirectFileRefused):
            if isinstance(error, DirectFileRefused):
                self._client.mount.give_up()
            waited = isinstance(error, TicketWaitedTooLong)
            self._refused[digest, waited] += 1
            if self._refused[digest, waited] >= (WAITS_PER_CHUNK if waited else TICKETS_PER_CHUNK):
                refused = StoreRefused(f"No ticket could be used; the last time: {error.detail}")
                if not self._goes_elsewhere(self._tickets.get(digest), refused):
                    raise refused from error
                del self._refused[digest, waited]
        elif isinstance(error, ChunkCorrupt):
            self._report(digest, error)
        else:
            raise error

    def _goes_elsewhere(self, ticket: ReadTicket | None, error: BaseException) -> bool:
        """Whether another store must give the chunk, because this one does not answer, or refuses."""
        if ticket is None or not ticket.elsewhere:
            return False
        if not isinstance(error, ServiceUnavailable | StoreRefused | TransferStopped):
            return False
        if isinstance(error, ServiceUnavailable | StoreRefused) and not self._source.avoids(ticket.store):
            self._source.avoid(ticket.store)
            does_not = "answer" if isinstance(error, ServiceUnavailable) else "give chunks"
            log.warning("the %s store does not %s (%s): reading from another one", ticket.store, does_not, error.detail)
            self._transfers.stop_store(ticket.store)
        return self._source.avoids(ticket.store) and not self._transfers.stopped.is_set()

    def _report(self, digest: str, error: ChunkCorrupt) -> None:
        """Reports the chunk to the service, which reads it itself. Returns if it must be read once more, over HTTP."""
        verdict = self._client.restores.report_chunk(
            self._checkpoint_id,
            ReportChunk(digest=digest, problem=error.problem, detail=text_to_keep(error.detail, 1000)),
        )
        if not verdict.readable:
            raise ChunkLost(digest, verdict.detail, verdict.corrupt_checkpoints) from error
        if digest in self._over_http:
            raise ReadsWrongHere(
                f"The service reads chunk {digest[:12]} well, but it arrives on {socket.gethostname()} wrong twice: "
                f"{error.detail}",
                context={"digest": digest},
            ) from error
        self._over_http.add(digest)


class ShardFetcher:
    """For one checkpoint; may fetch several times under one lease, one fetch at a time. `close` ends the lease.

    `workers` are shared with other transfers; without them it starts its own and ends them in `close`. After a failed
    fetch it can only be closed.
    """

    def __init__(self, client: Client, checkpoint_id: str, *, workers: TransferWorkers | None = None) -> None:
        self._client = client
        self._checkpoint_id = checkpoint_id
        self._workers = workers if workers is not None else TransferWorkers()
        self._owns_workers = workers is None
        self._source = TicketSource(client, checkpoint_id)
        self._transfers = ChunkTransfers(client)
        self._buffers = Buffers()

    @property
    def bytes_from(self) -> dict[StoreRole, int]:
        """Bytes of the chunks that came by a ticket, by the store that gave them."""
        return self._transfers.bytes_from

    def hold_lease(self, digest: str) -> None:
        """Takes a lease before the first fetch, by asking for a ticket of this chunk; one that is there is kept."""
        if self._source.seconds_until_renewal() is None:
            self._source.renew(digest)
        else:
            self._source.renew_if_due()

    @property
    def lease_is_due(self) -> bool:
        """Whether `renew_lease` would make a call."""
        return self._source.is_due

    def renew_lease(self) -> None:
        """For a reader that goes on with what it has: keeps the lease, if there is one and it is time."""
        self._source.renew_if_due()

    def chunk_list(self, rank: int) -> ShardChunks:
        """The chunks of a shard: as they came along with tickets, else asked for."""
        came = self._source.chunk_lists.get(rank)
        return came if came is not None else self._client.checkpoints.shard_chunks(self._checkpoint_id, rank)

    def stop(self) -> None:
        """From any thread: the fetch ends with TransferStopped, within a block or a socket's time-out."""
        self._transfers.stop()

    def fetch(
        self,
        digests: Iterable[str],
        on_chunk: Receive,
        into: Mapping[str, memoryview] | None = None,
        host: HostChunks | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        most_bytes: int = MAX_CHUNK_BYTES,
        shard: int | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """Calls `on_chunk(digest, bytes)` once per distinct digest, on the transfer threads, several at a time, begun
        in the order of `digests`. The view is reused when the call returns: copy what you keep. An error of the
        callback ends the fetch.

        `into`: a chunk with a buffer here of exactly its size arrives in it; the buffer is unproven until the callback.
        `host`: its chunks are taken from there, and one process of the host fetches the chunks that it shares.
        `sizes`: the known bytes of chunks; `most_bytes`: the most that any other chunk may have. `shard`: the first
        tickets bring this rank's chunk list along, for `chunk_list`. `buffers`: in place of the fetcher's own, which it
        keeps until it is closed.

        Raises ChunkLost if no copy could be read, ReadsWrongHere if only this machine reads it wrong, IntegrityError if
        a ticket names another size. When this returns or raises, no thread works for it any more.
        """
        self._source.shard = shard
        FetchSchedule(
            self._client,
            self._checkpoint_id,
            digests,
            source=self._source,
            transfers=self._transfers,
            sink=ChunkSink(buffers or self._buffers, on_chunk, into or {}, sizes or {}, most_bytes),
            host=host,
            workers=self._workers,
        ).run()

    def close(self) -> None:
        """Ends the lease and the threads."""
        if self._owns_workers:
            self._workers.close()
            self._owns_workers = False
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
