"""Reads one chunk by its ticket and proves it: only bytes with the chunk's size and SHA-256 are returned.

An encoded chunk is decoded while it arrives, and its raw bytes are hashed: they alone are the chunk. Whatever a store
sends, it takes no more memory than the chunk's buffer and a few blocks: reading ends at the ticket's size, and decoding
at the chunk's.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator

from holdfast_client.chunks.connections import LONGEST_BODY_BYTES, RateLimit, TransferPool, refusal
from holdfast_client.chunks.mounted_files import read_file
from holdfast_client.errors import ChunkCorrupt, ChunkGone, ChunkNotFound, HoldfastError, ServiceUnavailable
from holdfast_client.transport import Backoff, check_stop, retry_after_seconds
from holdfast_protocol.codecs import Codec, DecodeError, decode
from holdfast_protocol.restores import ReadTicket


def get_chunk(
    ticket: ReadTicket,
    into: memoryview | None,
    expected_digest: str,
    expected_bytes: int,
    pool: TransferPool,
    *,
    stop: threading.Event | None = None,
    retry_seconds: float | None = None,
) -> memoryview:
    """The chunk's bytes, in `into` (exactly `expected_bytes` long) or in a new buffer.

    Raises ChunkCorrupt (missing, truncated or mismatch: report it), TicketProblem (ask for a new ticket),
    DirectFileRefused (go over HTTP), StoreUnavailable (after all tries), StoreRefused, TransferStopped. After an
    exception the buffer's content is undefined.
    """
    buffer = memoryview(bytearray(expected_bytes)) if into is None else into
    if buffer.nbytes != expected_bytes:
        raise ValueError(f"the buffer has {buffer.nbytes} bytes, the chunk {expected_bytes}")
    if ticket.kind == "gone":
        raise ChunkCorrupt(expected_digest, "missing", "the service has no readable copy")
    backoff = Backoff(
        pool.retry_seconds if retry_seconds is None else retry_seconds,
        stop.wait if stop else time.sleep,
        from_failure=True,
    )
    while True:
        check_stop(stop)
        receiver = receiver_for(ticket, buffer, expected_digest, pool.rate_limit)
        try:
            if ticket.kind == "file":
                read_file(ticket.path, receiver, expected_digest, stop)
                failure, wait_seconds = None, 0.0
            else:
                failure, wait_seconds = _get_once(ticket, receiver, pool, stop, backoff)
        except ServiceUnavailable as error:
            failure, wait_seconds = error, 0.0
        if failure is None:
            receiver.finish()
            return buffer
        if isinstance(failure, ChunkNotFound | ChunkGone):
            raise ChunkCorrupt(expected_digest, "missing", "the store does not give it")
        if not isinstance(failure, ServiceUnavailable) or not backoff.pause(wait_seconds):
            raise failure


def _get_once(
    ticket: ReadTicket, receiver: Receiver, pool: TransferPool, stop: threading.Event | None, backoff: Backoff
) -> tuple[HoldfastError | None, float]:
    with pool.request("GET", ticket.url, ticket.headers, stop=stop, backoff=backoff) as response:
        if response.status != 200:
            said = response.read(LONGEST_BODY_BYTES)
            return refusal(response.status, said, ticket.answers), retry_after_seconds(response.headers)
        announced = response.headers.get("content-length", "")
        if announced.isdecimal():
            receiver.expect(int(announced))
        receiver.fill(response.readinto, stop)
        if not announced.isdecimal() and response.read(1):
            receiver.expect(receiver.wire_bytes + 1)
        return None, 0.0


BLOCK_BYTES = 1024 * 1024
"""Measured: blocks of 1 MiB cost 0.18 s of CPU per GB through urllib3, of 64 KiB 0.3 s, of 4 MiB 0.17 to 0.27 s."""


class Receiver:
    """One chunk's buffer, hashed while the bytes are in the CPU's cache. Its content is unproven until `finish`
    returns."""

    def __init__(self, buffer: memoryview, digest: str, rate_limit: RateLimit | None = None) -> None:
        """`rate_limit` None: no limit, for bytes from this host, which are no transfer."""
        self.buffer = buffer
        self.wire_bytes = buffer.nbytes
        self._rate_limit = rate_limit
        self._block_bytes = BLOCK_BYTES if rate_limit is None else rate_limit.slice_bytes(BLOCK_BYTES)
        self._digest = digest
        self._filled = 0
        self._hash = hashlib.sha256()

    def expect(self, announced_bytes: int) -> None:
        """The size that the other side announces. Raises ChunkCorrupt if it cannot be the chunk's."""
        if announced_bytes != self.wire_bytes:
            raise ChunkCorrupt(
                self._digest,
                "truncated" if announced_bytes < self.wire_bytes else "mismatch",
                f"{announced_bytes} bytes instead of {self.wire_bytes}",
            )

    def fill(self, read_into: Callable[[memoryview], int | None], stop: threading.Event | None) -> None:
        """Reads until the buffer is full. Raises ChunkCorrupt if the reader ends earlier."""
        while self._filled < self.buffer.nbytes:
            check_stop(stop)
            block = self.buffer[self._filled : self._filled + self._block_bytes]
            if self._rate_limit is not None:
                self._rate_limit.acquire(block.nbytes, stop)
            count = read_into(block)
            if not count:
                raise ChunkCorrupt(
                    self._digest, "truncated", f"{self._filled} bytes instead of {self.buffer.nbytes} arrived"
                )
            self._hash.update(block[:count])
            self._filled += count

    def finish(self) -> None:
        """Raises ChunkCorrupt unless the bytes are the chunk's."""
        found = self._hash.hexdigest()
        if found != self._digest:
            raise ChunkCorrupt(self._digest, "mismatch", f"its bytes hash to {found[:12]}")


WIRE_BLOCK_BYTES = 256 * 1024

ReadInto = Callable[[memoryview], int | None]


def receiver_for(ticket: ReadTicket, buffer: memoryview, digest: str, rate_limit: RateLimit | None = None) -> Receiver:
    """The receiver for the ticket's form of the chunk."""
    if ticket.codec is Codec.RAW:
        return Receiver(buffer, digest, rate_limit)
    return EncodedReceiver(buffer, digest, rate_limit, codec=ticket.codec, stored_bytes=ticket.stored_bytes)


class EncodedReceiver(Receiver):
    """As Receiver: `stored_bytes` come over the wire, and the buffer gets the decoded bytes."""

    def __init__(
        self, buffer: memoryview, digest: str, rate_limit: RateLimit | None = None, *, codec: Codec, stored_bytes: int
    ) -> None:
        super().__init__(buffer, digest, rate_limit)
        self.wire_bytes = stored_bytes
        self._codec = codec
        self._received = 0
        self._ended = False

    def fill(self, read_into: ReadInto, stop: threading.Event | None) -> None:
        """Reads to the end and decodes. Raises ChunkCorrupt if that gives another number of bytes."""
        arriving = self._arriving(read_into, stop)
        try:
            for block in decode(self._codec, self.buffer.nbytes, arriving):
                self.buffer[self._filled : self._filled + block.nbytes] = block
                self._hash.update(block)
                self._filled += block.nbytes
            for _ in arriving:  # to the end, because only then can the connection be used again
                pass
        except DecodeError as error:
            if not self._ended or self._received >= self.wire_bytes:
                raise ChunkCorrupt(self._digest, "mismatch", f"stored as {self._codec}, {error}") from None
        if self._received < self.wire_bytes:
            raise ChunkCorrupt(
                self._digest, "truncated", f"{self._received} bytes instead of {self.wire_bytes} arrived"
            )

    def _arriving(self, read_into: ReadInto, stop: threading.Event | None) -> Iterator[memoryview]:
        block = memoryview(bytearray(min(WIRE_BLOCK_BYTES, self._block_bytes)))
        while not self._ended:
            check_stop(stop)
            # One byte more than expected shows that there are more.
            part = block[: max(1, self.wire_bytes - self._received)]
            if self._rate_limit is not None:
                self._rate_limit.acquire(part.nbytes, stop)
            count = read_into(part)
            self._ended = not count
            if count:
                self._received += count
                if self._received > self.wire_bytes:
                    self.expect(self._received)
                yield part[:count]
