"""Sends one chunk as its ticket says: a PUT with exactly the ticket's headers, or a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from holdfast_client.chunks.connections import LONGEST_BODY_BYTES, TransferPool, error_code, refusal
from holdfast_client.chunks.mounted_files import write_incoming
from holdfast_client.chunks.rate_limit import RateLimit
from holdfast_client.errors import ChecksumMismatch, HoldfastError, ServiceUnavailable
from holdfast_client.transport import Backoff, check_stop, retry_after_seconds
from holdfast_protocol.checkpoints import StoreAnswer, UploadTicket

# Sends one chunk as its ticket says: a PUT with exactly the ticket's headers, or a file. `uploader` decides which.

SLICE_BYTES = 1024 * 1024
_CHECKSUM_TRIES = 2


def put_chunk(
    ticket: UploadTicket,
    body: memoryview,
    pool: TransferPool,
    *,
    stop: threading.Event | None = None,
    retry_seconds: float | None = None,
) -> None:
    """Returns when the store has taken the bytes; whether they are there and right is for the seal to say.

    Raises TicketProblem (negotiate again), StoreFull, StoreRefused, ChecksumMismatch (the bytes changed since they were
    hashed), DirectFileRefused (go over HTTP), StoreUnavailable (after all tries), TransferStopped. Never keeps `body`.
    """
    flat = body.cast("B") if body.format != "B" or body.ndim != 1 else body
    backoff = Backoff(
        pool.retry_seconds if retry_seconds is None else retry_seconds,
        stop.wait if stop else time.sleep,
        from_failure=True,
    )
    checksum_tries_left = _CHECKSUM_TRIES
    while True:
        check_stop(stop)
        try:
            if ticket.kind == "file":
                write_incoming(ticket.path, flat, pool.rate_limit, pool.cores, stop)
                return
            failure, wait_seconds = _put_once(ticket, flat, pool, stop, backoff)
        except ServiceUnavailable as error:
            failure, wait_seconds = error, 0.0
        if failure is None:
            return
        if isinstance(failure, ChecksumMismatch):
            # Once may have been the wire. Twice is the memory.
            checksum_tries_left -= 1
            if not checksum_tries_left:
                raise failure
        elif not isinstance(failure, ServiceUnavailable):
            raise failure
        if not backoff.pause(wait_seconds):
            raise failure


def _put_once(
    ticket: UploadTicket, body: memoryview, pool: TransferPool, stop: threading.Event | None, backoff: Backoff
) -> tuple[HoldfastError | None, float]:
    headers = dict(ticket.headers)
    if not any(name.lower() == "content-length" for name in headers):
        headers["Content-Length"] = str(body.nbytes)
    slices = _slices(body, pool.rate_limit, stop)
    with pool.request(ticket.method, ticket.url, headers, slices, stop=stop, backoff=backoff) as response:
        answer = response.read(LONGEST_BODY_BYTES)
        # 412: an earlier try has arrived after all (If-None-Match). The seal decides whether it is the right one.
        if 200 <= response.status < 300 or response.status == 412:
            return None, 0.0
        if ticket.answers.get(error_code(answer)) is StoreAnswer.STORED:
            return None, 0.0
        return refusal(response.status, answer, ticket.answers), retry_after_seconds(response.headers)


def _slices(body: memoryview, rate_limit: RateLimit, stop: threading.Event | None) -> Iterator[memoryview]:
    """A socket's time-out bounds a whole send, so that one send of 64 MiB would need 64 MiB within the time-out."""
    slice_bytes = rate_limit.slice_bytes(SLICE_BYTES)
    for start in range(0, body.nbytes, slice_bytes):
        check_stop(stop)
        block = body[start : start + slice_bytes]
        rate_limit.acquire(block.nbytes, stop)
        yield block
