"""One chunk: its hash before it goes up, and the way up or down by its ticket. It goes over HTTP, or as a plain file if
this machine proves that it sees the store's own filesystem (rule drop-box).

Down: only bytes with the chunk's size and SHA-256 are returned. An encoded chunk is decoded while it arrives, and its
raw bytes are hashed: they alone are the chunk. Whatever a store sends, it takes no more memory than the chunk's buffer
and a few blocks: reading ends at the ticket's size, and decoding at the chunk's.

A file is written into the store's `incoming` folder, and the service publishes from there. Reading is checked like any
other. The service says which file, so the client looks whether it lies in the mount that was proven: else a service
that has been taken over could have each trainer overwrite files of its own.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from holdfast_client.chunks.connections import LONGEST_BODY_BYTES, RateLimit, TransferPool, error_code, refusal
from holdfast_client.chunks.workers import CoreLimit
from holdfast_client.errors import (
    ChecksumMismatch,
    ChunkCorrupt,
    ChunkGone,
    ChunkNotFound,
    DirectFileRefused,
    Forbidden,
    HoldfastError,
    RouteNotFound,
    ServiceUnavailable,
    StoreFull,
    StoreUnavailable,
)
from holdfast_client.transport import Backoff, check_stop, retry_after_seconds
from holdfast_protocol.checkpoints import MountProof, MountProofOffer, StoreAnswer, UploadTicket
from holdfast_protocol.codecs import Codec, DecodeError, decode
from holdfast_protocol.restores import ReadTicket

# Before the way up.

Load = Callable[[threading.Event], memoryview]
"""Returns the chunk's bytes, on a transfer thread. May wait for them, in the order of the chunks; raises
TransferStopped soon after the event is set. The bytes must not change until `release`, or until the upload is over."""


@dataclass(frozen=True)
class OutgoingChunk:
    load: Load
    digest: str | None = None
    """SHA-256 of the bytes if it is known; else it is computed."""
    release: Callable[[], None] | None = None
    """Called on the uploading thread as soon as nothing reads the bytes any more: the service has verified the chunk,
    has it already, or they were encoded. Not called for open chunks when the upload fails."""
    item_bytes: int = 1
    """Bytes of one floating-point number, if most of the chunk is numbers of one size: compression orders their bytes
    into planes."""

    @classmethod
    def of(cls, body: bytes | memoryview, digest: str | None = None, *, item_bytes: int = 1) -> OutgoingChunk:
        """A chunk whose bytes are in memory."""
        return cls(lambda _: memoryview(body), digest, item_bytes=item_bytes)


@dataclass(frozen=True)
class HashedChunk:
    digest: str
    md5: str | None
    body: memoryview
    release: Callable[[], None] | None
    item_bytes: int = 1


def hash_chunk(
    chunk: OutgoingChunk, stop: threading.Event, *, with_md5: bool, cores: CoreLimit | None = None
) -> HashedChunk:
    """Loads the chunk and finds its digests. hashlib releases the interpreter's lock meanwhile. Without `cores` it runs
    at once, however many other threads compute."""
    body = chunk.load(stop)

    def digests() -> tuple[str, str | None]:
        md5 = hashlib.md5(body, usedforsecurity=False).hexdigest() if with_md5 else None
        return chunk.digest or hashlib.sha256(body).hexdigest(), md5

    digest, md5 = digests() if cores is None else cores.run(digests)
    return HashedChunk(digest, md5, body, chunk.release, chunk.item_bytes)


# Down.


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


# Up.

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
    """Sends one chunk by its ticket: a PUT with exactly the ticket's headers, or a file. Returns when the store has
    taken the bytes; the seal says whether they are there and right. Never keeps `body`.

    Raises TicketProblem (negotiate again), StoreFull, StoreRefused, ChecksumMismatch (the bytes changed since they were
    hashed), DirectFileRefused (use HTTP), StoreUnavailable (after all tries), TransferStopped.
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
            # One failure may be the wire's. Two are the memory's.
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
    """A socket's time-out bounds a whole send: one send of 64 MiB would have to end within it."""
    slice_bytes = rate_limit.slice_bytes(SLICE_BYTES)
    for start in range(0, body.nbytes, slice_bytes):
        check_stop(stop)
        block = body[start : start + slice_bytes]
        rate_limit.acquire(block.nbytes, stop)
        yield block


# As a plain file, either way, without HTTP.

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR}
_WRITE_BYTES = 64 * 1024 * 1024
"""Usually a whole chunk: after each write this thread needs the interpreter's lock, and training waits while it takes
it."""


@contextmanager
def _file_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        if error.errno in _FULL:
            raise StoreFull(f"The store's filesystem has no room left ({name})") from None
        if error.errno in _REFUSED:
            raise DirectFileRefused(f"The store's filesystem cannot be {what} from here ({name})") from None
        raise StoreUnavailable(f"The store's filesystem failed ({name})") from None


def write_incoming(
    path: str, body: memoryview, rate_limit: RateLimit, cores: CoreLimit, stop: threading.Event | None = None
) -> None:
    """Writes and closes the whole file, so that the service sees it, or leaves none. It need not be durable, because
    the service makes it so. The name is the ticket's own, so an existing file is from an earlier try; it
    is removed and never written into. Raises StoreFull, DirectFileRefused, StoreUnavailable, TransferStopped."""
    with _file_errors("written"):
        descriptor = _created(path)
        try:
            written, block_bytes = 0, rate_limit.slice_bytes(_WRITE_BYTES)
            while written < body.nbytes:
                check_stop(stop)
                block = body[written : written + block_bytes]
                rate_limit.acquire(block.nbytes, stop)
                written += cores.run(functools.partial(os.write, descriptor, block))
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)


def _created(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        with suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = os.open(path, flags, 0o600)
    try:
        _let_the_service_read(descriptor, os.stat(os.path.dirname(path)))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _let_the_service_read(descriptor: int, incoming: os.stat_result) -> None:
    """Gives the file the readers of the store's folder: a group may share it, and root may train for another user's
    service."""
    if incoming.st_mode & stat.S_IWGRP:
        os.fchmod(descriptor, 0o640)
    elif os.geteuid() == 0 != incoming.st_uid:
        os.fchown(descriptor, incoming.st_uid, incoming.st_gid)


def read_file(path: str, receiver: Receiver, digest: str, stop: threading.Event | None = None) -> None:
    """Reads a chunk's file. Raises ChunkCorrupt, also if the file is not there; DirectFileRefused; StoreUnavailable."""
    with _file_errors("read"):
        try:
            file = Path(path).open("rb", buffering=0)  # noqa: SIM115  (closed by the next `with`)
        except FileNotFoundError:
            raise ChunkCorrupt(digest, "missing", "its file is not there") from None
        with file:
            receiver.expect(os.fstat(file.fileno()).st_size)
            receiver.fill(file.readinto, stop)


_CONTENT = re.compile(r"[0-9a-f]{64}")
_TICKET_ID = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z-]{7,63}")
_RENEW_AT = 0.7
"""Part of a proof's life after which a new one is asked for, so that none expires on its way."""


_ASK_AGAIN_SECONDS = 30.0
"""The pause before the next try, after a mounted store did not answer the service."""


class MountAccess:
    """Proves that this machine sees the store's own filesystem, so that the service hands out paths instead of URLs.
    The proof is the content of a file that the service has just written. If that fails, all transfers silently use
    HTTP: a mount is a short cut and never a need. One per client, shared by all transfers. Thread-safe."""

    def __init__(self, offer: Callable[[], MountProofOffer], *, enabled: bool) -> None:
        self._offer = offer
        self._usable = enabled
        self._proof: MountProof | None = None
        self._others: list[MountProof] = []
        self._root: PurePath | None = None
        self._other_roots: list[PurePath] = []
        self._renew_at = float("-inf")
        self._lock = threading.Lock()

    def proof(self) -> MountProof | None:
        """The proof to send along, or None without a mount of the store that is written to. Raises HoldfastError if the
        service is unavailable."""
        with self._lock:
            self._renew()
            return self._proof

    def new_file(self) -> str | None:
        """A file in the mount that is written to, as a ticket would name one; None without a mount. Raises as `proof`
        does."""
        if self.proof() is None or self._root is None:
            return None
        return str(self._root / "incoming" / uuid.uuid4().hex)

    def other_proofs(self) -> list[MountProof]:
        """Proofs for the mounts of further stores, for reading. Raises as `proof` does."""
        with self._lock:
            self._renew()
            return list(self._others)

    def check_write(self, path: str) -> None:
        """Raises DirectFileRefused for any file but one of `incoming` in the mount that is written to, and for all once
        it was given up."""
        self._refuse_given_up()
        file = PurePath(path)
        if self._root is None or file.parent != self._root / "incoming" or not _TICKET_ID.fullmatch(file.name):
            raise DirectFileRefused("The service names a file to write that is not in the store's own folder")

    def check_read(self, path: str) -> None:
        """Raises DirectFileRefused for a file outside of the mounts that were proven, and for all once they were given
        up."""
        self._refuse_given_up()
        file = PurePath(path)
        roots = [*self._other_roots, *([] if self._root is None else [self._root])]
        if ".." in file.parts or not any(file.is_relative_to(root) for root in roots):
            raise DirectFileRefused("The service names a file to read that is not in a store's own folder")

    def give_up(self) -> None:
        """Reading or writing there was refused or fails: use HTTP from now on."""
        with self._lock:
            self._usable, self._proof, self._others = False, None, []

    def _refuse_given_up(self) -> None:
        """For tickets from before."""
        if not self._usable:
            raise DirectFileRefused("The store's own folder is not used from here any more")

    def _renew(self) -> None:
        if not self._usable or time.monotonic() < self._renew_at:
            return
        asked_at = time.monotonic()
        try:
            offer = self._offer()
        except (Forbidden, RouteNotFound):
            offer = _NOTHING
        self._proof = _prove(offer)
        if self._proof is not None:
            self._root = _root_of(offer)
        proven = [(other, proof) for other in offer.others if (proof := _prove(other)) is not None]
        self._others = [proof for _, proof in proven]
        self._other_roots = [root for other, _ in proven if (root := _root_of(other)) is not None] or self._other_roots
        self._usable = self._proof is not None or bool(self._others) or offer.unavailable
        life_seconds = offer.expires_in_seconds * _RENEW_AT
        self._renew_at = asked_at + (min(life_seconds, _ASK_AGAIN_SECONDS) if offer.unavailable else life_seconds)


_NOTHING = MountProofOffer(proof_id=None, path=None, expires_in_seconds=0)


def _root_of(offer: MountProofOffer) -> PurePath | None:
    """The store's folder, of which the offer names the file `proofs/<proof id>`; None: it names another one."""
    if offer.proof_id is None or offer.path is None:
        return None
    file = PurePath(offer.path)
    named = file.is_absolute() and ".." not in file.parts and file.parts[-2:] == ("proofs", offer.proof_id)
    return file.parent.parent if named else None


def _prove(offer: MountProofOffer) -> MountProof | None:
    if offer.proof_id is None or offer.path is None or _root_of(offer) is None:
        return None
    try:
        with open(offer.path, encoding="ascii") as file:
            content = file.read(65).strip()
    except (OSError, ValueError):
        return None
    return MountProof(proof_id=offer.proof_id, content=content) if _CONTENT.fullmatch(content) else None
