"""Ranks on other hosts as a source of chunks, for the length of one restore: a chunk that several hosts want leaves the
store once.

    its owner:          [store] -> proven -> folder -> PeerServer
    on the other hosts: digest -> [HTTP] -> proven -> buffer
                               '-> wrong, late or gone -> [store]

No rank depends on another one. A peer that lies, stalls or cannot be reached is asked no more in this restore, and the
store gives its chunks. One that is only late, or silent once, is asked for the next chunk all the same. A peer answers
for the digests of this restore that it owns, to callers that know its token, and for nothing else. The bytes are not
encrypted.

It is HTTP of the fewest words, read here and not by the standard library, which bounds neither how long the first lines
of a request or an answer take nor how much memory they fill.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, NamedTuple

from holdfast_client.chunks.transfer import BLOCK_BYTES, Receiver
from holdfast_client.errors import ChunkCorrupt
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.transport import check_stop

log = logging.getLogger("holdfast.client")

CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""A peer that sends nothing for so long is asked no more, and a caller that takes nothing is cut off. The first lines
of a request or an answer must be there whole within this time. A peer that has answered before may once be later."""
LONGEST_WAIT_SECONDS = 30.0
"""The longest wait for an owner that answers, but has not fetched the chunk yet. Each time that it was late, the next
wait for it is half as long; with each chunk that it gives, twice as long again. So one slow chunk, or a store that was
away for a while, makes no host read all for itself, and an owner that gets nothing any more costs a minute."""
SLOWEST_BYTES_PER_SECOND = 2 * 1024**2
UNREACHABLE_HOSTS = 2
"""After so many, and none that could be reached, nothing else is tried: a firewall stands between the hosts."""

_ANSWER_WITHIN_SECONDS = 1.0
"""An owner that waits for a chunk says so this often."""
_REST_SECONDS = 0.5
_MOST_REQUESTS = 256
"""Answered at once; others wait in the system's queue."""
_WAITS_UP_TO = _MOST_REQUESTS // 2
"""With more requests than this an owner says at once that it has a chunk not yet, and holds no thread for it."""
_SENDS_UP_TO = _MOST_REQUESTS * 7 // 8
"""With more requests than this it says so of each chunk. So a place is free for the next one that asks, which otherwise
would wait in the system's queue until it takes the owner for dead."""
_HEAD_BYTES = 4096
"""The most that the lines before the bytes of a chunk may take. Ours take 200."""
_PATH = "/chunks/"
_ANSWERS = {
    str(status.value): status for status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE)
}
_OWN_TROUBLE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""What this machine has run out of says nothing of the peer."""
_NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""The folder's filesystem cannot do it."""


@dataclass(frozen=True)
class PeerAddress:
    """Where a rank answers, and the token that it wants to see."""

    host: str
    """As numbers: no other host has to know a name of this one, or knows it by another address."""
    port: int
    token: str = field(repr=False)


class _PeerError(Exception):
    """The other side does not do as agreed."""


class _Head(NamedTuple):
    """The lines before the bytes."""

    first: list[str]
    """The words of the first line."""
    fields: dict[str, str]
    """By name, in small letters."""
    rest: bytes
    """What has come along of the bytes after them."""


def _read_head(connection: socket.socket) -> _Head:
    """Within SILENCE_SECONDS, however many pieces it comes in. Raises OSError, and _PeerError."""
    ends, came = time.monotonic() + SILENCE_SECONDS, b""
    while (length := came.find(b"\r\n\r\n")) < 0:
        if len(came) >= _HEAD_BYTES:
            raise _PeerError(f"its first lines are longer than {_HEAD_BYTES} bytes")
        if (left := ends - time.monotonic()) <= 0:
            raise TimeoutError("its first lines take too long")
        connection.settimeout(left)
        if not (part := connection.recv(_HEAD_BYTES - len(came))):
            raise _PeerError("it has ended the connection")
        came += part
    first, *lines = came[:length].decode("latin-1").split("\r\n")
    named = [line.partition(":") for line in lines]
    return _Head(first.split(), {name.lower(): value.strip() for name, _, value in named}, came[length + 4 :])


def _latest_end(size: int) -> float:
    """When a chunk of this size has gone over at the latest."""
    return time.monotonic() + SILENCE_SECONDS + size / SLOWEST_BYTES_PER_SECOND


class PeerServer:
    """Passes on the chunks that this process owns, on threads of its own. Raises OSError if it cannot listen there, and
    RuntimeError if the system gives no thread."""

    def __init__(self, host: str) -> None:
        """`host`: the address that it listens on, which the other hosts can reach."""
        self._token = secrets.token_hex(32)
        self._changed = threading.Condition()
        self._folder: ChunkFolder | None = None
        self._owned: frozenset[str] | None = None
        self._settled: set[str] = set()
        self._gives_up = False
        self._listener = _Listener(host, self)
        address, port = self._listener.where
        self.address = PeerAddress(address, port, self._token)
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(0.1,), name="holdfast-peers", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            self._listener.server_close()
            raise

    def begin(self, folder: ChunkFolder | None, owned: Collection[str]) -> None:
        """Who asked earlier waits for this. `owned`: what it answers for, once it lies in the folder."""
        with self._changed:
            self._folder, self._owned = folder, frozenset(owned)
            self._changed.notify_all()

    def owns(self, digest: str) -> bool:
        return self._owned is not None and digest in self._owned

    def settle(self, digest: str) -> None:
        """The chunk is in the folder now, or will not be: there may be no room for it."""
        if self.owns(digest):
            with self._changed:
                self._settled.add(digest)
                self._changed.notify_all()

    def give_up(self) -> None:
        """Nothing more will come: this rank reads no further."""
        with self._changed:
            self._gives_up = True
            self._changed.notify_all()

    def close(self) -> None:
        """No thread of it uses the folder any more when this returns."""
        self.give_up()
        self._listener.end()
        self._thread.join()

    def is_known(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def find(self, digest: str) -> tuple[HTTPStatus, ChunkFolder | None]:
        """OK with the folder to look into, NOT_FOUND, or SERVICE_UNAVAILABLE: ask again."""

        def is_decided() -> bool:
            return self._gives_up or digest in self._settled or (self._owned is not None and digest not in self._owned)

        wait_seconds = _ANSWER_WITHIN_SECONDS if self._listener.requests <= _WAITS_UP_TO else 0.0
        with self._changed:
            if not self._changed.wait_for(is_decided, wait_seconds):
                return HTTPStatus.SERVICE_UNAVAILABLE, None
            if digest not in self._settled or self._folder is None:
                return HTTPStatus.NOT_FOUND, None
            if self._listener.requests > _SENDS_UP_TO:
                return HTTPStatus.SERVICE_UNAVAILABLE, None
            return HTTPStatus.OK, self._folder


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, host: str, peer: PeerServer) -> None:
        self.address_family, _, _, _, where = _resolved(host, socket.SOCK_STREAM)[0]
        if ip_address(where[0]).is_unspecified:
            raise OSError(f"{host} stands for all addresses of this machine, and others can reach none by it")
        self.peer = peer
        self._free = threading.Semaphore(_MOST_REQUESTS)
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        super().__init__((str(where[0]), 0), _Request)
        self.where: tuple[str, int] = str(self.server_address[0]), int(self.server_address[1])

    @property
    def requests(self) -> int:
        """How many have a thread now."""
        return len(self._open)

    def end(self) -> None:
        self._cut()  # else the loop could wait for one of them
        self.shutdown()
        self.server_close()
        self._cut()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is free, and the peer that waits would wake this loop at once
            time.sleep(_REST_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self._free.acquire()
        with self._changed:
            self._open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a peer has left: %s", client_address, exc_info=True)

    def _ended(self, request: socket.socket) -> None:
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()
        self._free.release()

    def _cut(self) -> None:
        with self._changed:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


class _Request(socketserver.BaseRequestHandler):
    """One request on a connection of its own: a thread is held only while there is something to do."""

    server: _Listener

    def handle(self) -> None:
        head = _read_head(self.request)
        self.request.settimeout(SILENCE_SECONDS)
        peer = self.server.peer
        if not peer.is_known(head.fields.get("authorization", "")):
            self._say(HTTPStatus.FORBIDDEN)
            return
        if len(head.first) != 3 or head.first[0] != "GET":
            self._say(HTTPStatus.NOT_IMPLEMENTED)
            return
        digest = head.first[1].removeprefix(_PATH)
        status, folder = peer.find(digest)
        if folder is None:
            self._say(status)
            return
        with folder.opened(digest) as descriptor:
            if descriptor is None:
                self._say(HTTPStatus.NOT_FOUND)
            else:
                size = os.fstat(descriptor).st_size
                self._say(HTTPStatus.OK, size)
                self._send(descriptor, size)

    def _say(self, status: HTTPStatus, size: int = 0) -> None:
        lines = f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Length: {size}", "Connection: close"
        self.request.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())

    def _send(self, descriptor: int, size: int) -> None:
        ends, sent = _latest_end(size), 0
        takes = select.poll()
        takes.register(self.request, select.POLLOUT)
        while sent < size:
            left = min(ends - time.monotonic(), SILENCE_SECONDS)
            if left <= 0 or not takes.poll(left * 1000):
                raise TimeoutError("it takes too slowly")
            with suppress(BlockingIOError):
                sent += self._send_some(descriptor, sent, size - sent)

    def _send_some(self, descriptor: int, start: int, count: int) -> int:
        try:
            sent = os.sendfile(self.request.fileno(), descriptor, start, count)
        except OSError as error:
            if error.errno not in _NO_SENDFILE:
                raise
            sent = self.request.send(os.pread(descriptor, min(count, BLOCK_BYTES), start))
        if not sent:
            raise _PeerError("the chunk's file has become shorter")
        return sent


class Peers:
    """The other ranks, as one rank sees them. Thread-safe."""

    def __init__(self, owners: Mapping[str, PeerAddress], server: PeerServer) -> None:
        """`owners`: digest -> who passes it on to this rank. `server`: what this rank passes on."""
        self.server = server
        self._owners = owners
        self._lock = threading.Lock()
        self._dropped: set[PeerAddress] = set()
        self._late: Counter[PeerAddress] = Counter()
        self._answered: set[PeerAddress] = set()
        self._silent: dict[PeerAddress, float] = {}
        """When a peer was found silent that had answered before, until it answers again."""
        self._has_reached_one = False
        self.taken_bytes = 0

    def have(self, digest: str) -> bool:
        """Whether the chunk goes from one host to others, from here or to here."""
        return digest in self._owners or self.server.owns(digest)

    def take(self, digest: str, buffer: memoryview, stop: threading.Event) -> bool:
        """Fills the buffer, exactly as long as the chunk, from the chunk's owner, and proves it. False: the store must
        give it, and the buffer's content is undefined. Raises TransferStopped."""
        peer = self._owners.get(digest)
        if peer is None:
            return False
        times_late = self._late[peer]
        ends = time.monotonic() + self.patience_seconds(peer)
        while self._is_asked(peer):
            check_stop(stop)
            asked_at = time.monotonic()
            try:
                status = self._ask(peer, digest, buffer, stop)
            except (OSError, _PeerError, ChunkCorrupt) as error:
                if getattr(error, "errno", None) not in _OWN_TROUBLE:
                    self._drop(peer, error)
                return False
            if status is HTTPStatus.OK:
                with self._lock:
                    self.taken_bytes += buffer.nbytes
                    self._late[peer] = max(0, self._late[peer] - 1)
                return True
            if status is HTTPStatus.NOT_FOUND:
                return False
            if status is None or time.monotonic() >= ends:
                self._note_late(peer, times_late)
                return False
            # An owner takes so long for this answer. One that is quicker is not asked again and again.
            stop.wait(max(0.0, asked_at + _ANSWER_WITHIN_SECONDS - time.monotonic()))
        return False

    def patience_seconds(self, peer: PeerAddress) -> float:
        """How long the next chunk may let itself be waited for."""
        return LONGEST_WAIT_SECONDS * 0.5 ** self._late[peer]

    def _ask(self, peer: PeerAddress, digest: str, buffer: memoryview, stop: threading.Event) -> HTTPStatus | None:
        """None: it does not answer, and has answered before."""
        asked_at = time.monotonic()
        with ExitStack() as stack:
            try:
                connection = socket.create_connection((peer.host, peer.port), CONNECT_SECONDS)
                stack.enter_context(connection)
                self._has_reached_one = True
                connection.settimeout(SILENCE_SECONDS)
                lines = f"GET {_PATH}{digest} HTTP/1.1", "Host: peer", f"Authorization: Bearer {peer.token}"
                connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
                head = _read_head(connection)
            except TimeoutError:
                if self._may_be_silent(peer, asked_at):
                    return None
                raise
            status = _ANSWERS.get(head.first[1] if len(head.first) > 1 else "")
            if status is None:
                raise _PeerError(f"it answers {' '.join(head.first)[:40]!r}")
            with self._lock:
                self._answered.add(peer)
                self._silent.pop(peer, None)
            if status is not HTTPStatus.OK:
                return status
            length = head.fields.get("content-length", "")
            if not length.isdecimal():
                raise _PeerError("it does not say how long the chunk is")
            ends, came = _latest_end(buffer.nbytes), head.rest

            def read_into(block: memoryview) -> int:
                nonlocal came
                if came:
                    part, came = came[: block.nbytes], came[block.nbytes :]
                    block[: len(part)] = part
                    return len(part)
                if (left := ends - time.monotonic()) <= 0:
                    raise TimeoutError("it sends too slowly")
                connection.settimeout(min(left, SILENCE_SECONDS))
                return connection.recv_into(block)

            receiver = Receiver(buffer, digest)
            receiver.expect(int(length))
            receiver.fill(read_into, stop)
            receiver.finish()
            return HTTPStatus.OK

    def _is_asked(self, peer: PeerAddress) -> bool:
        with self._lock:
            if peer in self._dropped:
                return False
            return self._has_reached_one or len({each.host for each in self._dropped}) < UNREACHABLE_HOSTS

    def _may_be_silent(self, peer: PeerAddress, asked_at: float) -> bool:
        """Once, if it has answered before: so many may ask it that it comes to nobody in time. Several threads that
        have waited at once count once."""
        with self._lock:
            return peer in self._answered and self._silent.setdefault(peer, time.monotonic()) >= asked_at

    def _note_late(self, peer: PeerAddress, times_late: int) -> None:
        """`times_late`: before this wait. Several threads that have waited at once count once."""
        with self._lock:
            if self._late[peer] != times_late:
                return
            self._late[peer] += 1
        if times_late == 0:
            log.warning("the rank at %s:%d is late with a chunk: the store gives it", peer.host, peer.port)

    def _drop(self, peer: PeerAddress, error: Exception) -> None:
        with self._lock:
            if peer in self._dropped:
                return
            self._dropped.add(peer)
        log.warning(
            "the rank at %s:%d is asked for no more chunks in this restore, and the store gives them: %s",
            peer.host,
            peer.port,
            error or type(error).__name__,
        )


def address_towards(master: str | None) -> str | None:
    """The address of this machine on its way to the job's master, which the job's other hosts know it by; None if it
    has only the loopback one. No packet is sent."""
    for towards in filter(None, (master, "192.0.2.1", "2001:db8::1")):  # then: on the way to anywhere else
        with suppress(OSError):
            for family, kind, _, _, where in _resolved(towards, socket.SOCK_DGRAM):
                address = _address_on_the_way(family, kind, where)
                if address is not None:
                    return address
    return None


def _address_on_the_way(family: int, kind: int, where: Any) -> str | None:
    """None if nothing leads there, or only what stays on this machine or its cable."""
    try:
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
    except OSError:  # a name may have an IPv6 address, and this machine no way there
        return None
    found = ip_address(address)
    return None if found.is_loopback or found.is_link_local else address


def _resolved(host: str, kind: socket.SocketKind) -> Any:
    """As `socket.getaddrinfo`. Raises OSError, also for what cannot be a name, such as `10.0.0..1`."""
    try:
        return socket.getaddrinfo(host, 9, type=kind)  # any port: the address counts
    except UnicodeError as error:
        raise OSError(f"{host!r} is no address ({error})") from error
