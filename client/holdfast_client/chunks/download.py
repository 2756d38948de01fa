"""Reads one chunk as its ticket says and proves it: nothing is returned whose size and SHA-256 are not the chunk's."""

from __future__ import annotations

import threading
import time

from holdfast_client.chunks.connections import LONGEST_BODY_BYTES, TransferPool, refusal
from holdfast_client.chunks.mounted_files import read_file
from holdfast_client.chunks.receive import Receiver, receiver_for
from holdfast_client.errors import ChunkCorrupt, ChunkGone, ChunkNotFound, HoldfastError, ServiceUnavailable
from holdfast_client.transport import Backoff, check_stop, retry_after_seconds
from holdfast_protocol.checkpoints import ReadTicket


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
            raise ChunkCorrupt(expected_digest, "missing", "the store does not have it")
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
