"""Chunks from host to host over HTTP of the fewest words, both sides: ranks (peers.py) and node agents speak it.

    caller:    connect -> ask -> the head of the answer -> receive_chunk or read_body
    listener:  accept -> a thread -> the head of the request -> token -> PeerRequest.answer

It is read here and not by the standard library, which bounds neither how long the first lines of a request or an answer
take nor how much memory they fill. The bytes are not encrypted.
"""

from __future__ import annotations

import errno
import hmac
import logging
import math
import os
import secrets
import select
import socket
import socketserver
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, NamedTuple

from holdfast_client.chunks.transfer import BLOCK_BYTES, Receiver

log = logging.getLogger("holdfast.client")

CHUNKS = "/chunks/"
CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""A peer that sends nothing for so long is asked no more, and a caller that takes nothing is cut off. The first lines
of a request or an answer must be there whole within this time. A peer that has answered before may once be later."""
SLOWEST_BYTES_PER_SECOND = 2 * 1024**2
OWN_TROUBLE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
"""What this machine has run out of says nothing of the peer."""

_REST_SECONDS = 0.5
_HEAD_BYTES = 4096
"""The most that the lines before the bytes may take. Ours take 200."""
_NO_SENDFILE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
"""The filesystem cannot do it."""


@dataclass(frozen=True)
class PeerAddress:
    """Where a rank or an agent answers, and the token that it wants to see."""

    host: str
    """As numbers: no other host has to know a name of this one, or knows it by another address."""
    port: int
    token: str = field(repr=False)


class PeerError(Exception):
    """The other side does not do as agreed."""


class Head(NamedTuple):
    """The lines before the bytes."""

    first: list[str]
    """The words of the first line."""
    fields: dict[str, str]
    """By name, in small letters."""
    rest: bytes
    """What has come along of the bytes after them."""

    @property
    def length(self) -> int:
        """Of the bytes after them. Raises PeerError."""
        length = self.fields.get("content-length", "")
        if not length.isdecimal():
            raise PeerError("it does not say how long the chunk is")
        return int(length)


def read_head(connection: socket.socket) -> Head:
    """Within SILENCE_SECONDS, however many pieces it comes in. Raises OSError, and PeerError."""
    ends, came = time.monotonic() + SILENCE_SECONDS, b""
    while (length := came.find(b"\r\n\r\n")) < 0:
        if len(came) >= _HEAD_BYTES:
            raise PeerError(f"its first lines are longer than {_HEAD_BYTES} bytes")
        if (left := ends - time.monotonic()) <= 0:
            raise TimeoutError("its first lines take too long")
        connection.settimeout(left)
        if not (part := connection.recv(_HEAD_BYTES - len(came))):
            raise PeerError("it has ended the connection")
        came += part
    first, *lines = came[:length].decode("latin-1").split("\r\n")
    named = [line.partition(":") for line in lines]
    return Head(first.split(), {name.lower(): value.strip() for name, _, value in named}, came[length + 4 :])


def _most_seconds(size: int) -> float:
    """So many bytes have gone over then at the latest."""
    return SILENCE_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def _joined(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def connect(peer: PeerAddress) -> socket.socket:
    """Raises OSError."""
    return socket.create_connection((peer.host, peer.port), CONNECT_SECONDS)


def ask(
    connection: socket.socket,
    peer: PeerAddress,
    method: str,
    path: str,
    *,
    expects: Collection[HTTPStatus],
    body: bytes = b"",
) -> tuple[HTTPStatus, Head]:
    """The answer, without the bytes that follow. Raises OSError, and PeerError if it is none of these."""
    connection.settimeout(_most_seconds(len(body)))
    about = f"Authorization: Bearer {peer.token}", f"Content-Length: {len(body)}"
    connection.sendall(_joined(f"{method} {path} HTTP/1.1", "Host: peer", *about) + body)
    head = read_head(connection)
    status = next((status for status in expects if head.first[1:2] == [str(status.value)]), None)
    if status is None:
        raise PeerError(f"it answers {' '.join(head.first)[:40]!r}")
    return status, head


def receive_chunk(
    connection: socket.socket, head: Head, receiver: Receiver, stop: threading.Event, *, in_time: bool = True
) -> None:
    """The bytes after the head, proven. `in_time`: at SLOWEST_BYTES_PER_SECOND at least; else silence alone ends it.
    Raises OSError, PeerError, ChunkCorrupt, and TransferStopped."""
    receiver.expect(head.length)
    receiver.fill(_Arriving(connection, head, in_time=in_time).read_into, stop)
    receiver.finish()


def read_body(connection: socket.socket, head: Head, most_bytes: int) -> bytes:
    """No memory is taken for bytes that have not come. Raises OSError, and PeerError."""
    if head.length > most_bytes:
        raise PeerError(f"it sends {head.length} bytes")
    body, arriving = bytearray(), _Arriving(connection, head)
    block = memoryview(bytearray(min(head.length, BLOCK_BYTES)))
    while left := head.length - len(body):
        if not (count := arriving.read_into(block[:left])):
            raise PeerError("it has ended the connection")
        body += block[:count]
    return bytes(body)


class _Arriving:
    """The bytes after a head."""

    def __init__(self, connection: socket.socket, head: Head, *, in_time: bool = True) -> None:
        self._connection = connection
        self._came = head.rest
        self._ends = time.monotonic() + _most_seconds(head.length) if in_time else math.inf

    def read_into(self, block: memoryview) -> int:
        """How many are in the block now; 0: there are no more. Raises OSError."""
        if self._came:
            part, self._came = self._came[: block.nbytes], self._came[block.nbytes :]
            block[: len(part)] = part
            return len(part)
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError("it sends too slowly")
        self._connection.settimeout(min(left, SILENCE_SECONDS))
        return self._connection.recv_into(block)


class PeerListener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Listens from its construction on, with a token of its own, and answers on threads of its own. A thread is held
    for as long only as the times above allow."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, host: str, answers: type[PeerRequest], *, most: int, earlier: PeerAddress | None = None) -> None:
        """`host`: the address that it listens on, which other hosts can reach. `most`: connections at once; others wait
        in the system's queue. `earlier`: taken again if it is of this host and its port is free. Raises OSError if it
        cannot listen there."""
        self.address_family, _, _, _, where = resolved(host, socket.SOCK_STREAM)[0]
        if ip_address(where[0]).is_unspecified:
            raise OSError(f"{host} stands for all addresses of this machine, and others can reach none by it")
        self._free = threading.Semaphore(most)
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        host = str(where[0])
        if earlier is not None and earlier.host == host:
            with suppress(OSError):
                super().__init__((host, earlier.port), answers)
                self.address = earlier
                return
        super().__init__((host, 0), answers)
        self.address = PeerAddress(host, int(self.server_address[1]), token=secrets.token_hex(32))

    @property
    def requests(self) -> int:
        """How many have a thread now."""
        return len(self._open)

    def begin(self, name: str) -> None:
        """`name`: of its thread. Raises RuntimeError if the system gives none; it is closed then."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.server_close()
            raise

    def end(self) -> None:
        """No thread of it runs any more when this returns."""
        self._cut()  # else the loop could wait for one of them
        self.shutdown()
        self.server_close()
        self._cut()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        self._thread.join()

    def is_known(self, head: Head) -> bool:
        shown = head.fields.get("authorization", "")
        return hmac.compare_digest(shown.encode(), f"Bearer {self.address.token}".encode())

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


class PeerRequest(socketserver.BaseRequestHandler):
    """One request on a connection of its own: a thread is held only while there is something to do."""

    server: PeerListener

    def answer(self, method: str, path: str, head: Head) -> None:
        """Of one who has shown the token. Any error ends the connection."""
        raise NotImplementedError  # the swarm's request and the agent's each give their own answer

    def handle(self) -> None:
        head = read_head(self.request)
        self.request.settimeout(SILENCE_SECONDS)
        if not self.server.is_known(head):
            self.say(HTTPStatus.FORBIDDEN)
        elif len(head.first) != 3:
            self.say(HTTPStatus.NOT_IMPLEMENTED)
        else:
            method, path, _ = head.first
            self.answer(method, path, head)

    def say(self, status: HTTPStatus, size: int = 0) -> None:
        about = f"Content-Length: {size}", "Connection: close"
        self.request.sendall(_joined(f"HTTP/1.1 {status.value} {status.phrase}", *about))

    def send_body(self, body: bytes) -> None:
        self.request.settimeout(_most_seconds(len(body)))
        self.request.sendall(body)

    def send_range(self, descriptor: int, start: int, size: int) -> None:
        """Of a file or memory."""
        ends, sent = time.monotonic() + _most_seconds(size), 0
        takes = select.poll()
        takes.register(self.request, select.POLLOUT)
        while sent < size:
            left = min(ends - time.monotonic(), SILENCE_SECONDS)
            if left <= 0 or not takes.poll(left * 1000):
                raise TimeoutError("it takes too slowly")
            with suppress(BlockingIOError):
                sent += self._send_some(descriptor, start + sent, size - sent)

    def _send_some(self, descriptor: int, start: int, count: int) -> int:
        try:
            sent = os.sendfile(self.request.fileno(), descriptor, start, count)
        except OSError as error:
            if error.errno not in _NO_SENDFILE:
                raise
            sent = self.request.send(os.pread(descriptor, min(count, BLOCK_BYTES), start))
        if not sent:
            raise PeerError("the chunk's file has become shorter")
        return sent


def resolved(host: str, kind: socket.SocketKind) -> Any:
    """As `socket.getaddrinfo`. Raises OSError, also for what cannot be a name, such as `10.0.0..1`."""
    try:
        return socket.getaddrinfo(host, 9, type=kind)  # any port: the address counts
    except UnicodeError as error:
        raise OSError(f"{host!r} is no address ({error})") from error
