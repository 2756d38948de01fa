"""Ranks on other hosts as a source of chunks, for the length of one restore: a chunk that several hosts want leaves the
store once.

    its owner:          [store] -> proven -> folder -> PeerServer
    on the other hosts: digest -> [HTTP] -> proven -> buffer
                               '-> wrong, late or gone -> [store]

No rank depends on another one. A peer that lies, stalls or cannot be reached is asked no more in this restore, and the
store gives its chunks. A peer answers for the digests of this restore that it owns, to callers that know its token, and
for nothing else. The bytes are not encrypted.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from typing import Any

from holdfast_client.chunks.transfer import Receiver
from holdfast_client.errors import ChunkCorrupt
from holdfast_client.local.chunk_folder import ChunkFolder
from holdfast_client.transport import check_stop

log = logging.getLogger("holdfast.client")

CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""A peer that sends nothing for so long is asked no more, and a caller that takes nothing is cut off."""
LONGEST_WAIT_SECONDS = 30.0
"""The longest wait for an owner that answers, but has not fetched the chunk yet."""
SLOWEST_BYTES_PER_SECOND = 2 * 1024**2
UNREACHABLE_HOSTS = 2
"""After so many, and none that could be reached, nothing else is tried: a firewall stands between the hosts."""

_ANSWER_WITHIN_SECONDS = 1.0
"""An owner that waits for a chunk says so this often."""
_REST_SECONDS = 0.5
_MOST_REQUESTS = 256
"""Answered at once; others wait in the system's queue."""
_PATH = "/chunks/"


@dataclass(frozen=True)
class PeerAddress:
    """Where a rank answers, and the token that it wants to see."""

    host: str
    port: int
    token: str


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
        self.address = PeerAddress(host, self._listener.port, self._token)
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

        with self._changed:
            if not self._changed.wait_for(is_decided, _ANSWER_WITHIN_SECONDS):
                return HTTPStatus.SERVICE_UNAVAILABLE, None
            found = digest in self._settled and self._folder is not None
            return (HTTPStatus.OK, self._folder) if found else (HTTPStatus.NOT_FOUND, None)


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, peer: PeerServer) -> None:
        self.address_family, _, _, _, where = _resolved(host, socket.SOCK_STREAM)
        self.peer = peer
        self._free = threading.Semaphore(_MOST_REQUESTS)
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        super().__init__((str(where[0]), 0), _Request)
        self.port = int(self.server_address[1])

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


class _Request(BaseHTTPRequestHandler):
    """One request on a connection of its own: a thread is held only while there is something to do."""

    server: _Listener
    timeout = SILENCE_SECONDS

    def do_GET(self) -> None:
        peer = self.server.peer
        if not peer.is_known(self.headers.get("Authorization", "")):
            self._say(HTTPStatus.FORBIDDEN)
            return
        digest = self.path.removeprefix(_PATH)
        status, folder = peer.find(digest)
        if folder is None:
            self._say(status)
            return
        with folder.opened(digest) as descriptor:
            if descriptor is None:
                self._say(HTTPStatus.NOT_FOUND)
            else:
                self._say(HTTPStatus.OK, os.fstat(descriptor).st_size)
                self._send(descriptor)

    def _say(self, status: HTTPStatus, size: int = 0) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def _send(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            self.connection.sendfile(file)

    def log_message(self, *said: Any) -> None:
        log.debug(*said)


class Peers:
    """The other ranks, as one rank sees them. Thread-safe."""

    def __init__(self, owners: Mapping[str, PeerAddress], server: PeerServer) -> None:
        """`owners`: digest -> who passes it on to this rank. `server`: what this rank passes on."""
        self.server = server
        self._owners = owners
        self._lock = threading.Lock()
        self._dropped: set[PeerAddress] = set()
        self._has_reached_one = False
        self.taken_bytes = 0

    def have(self, digest: str) -> bool:
        """Whether the chunk goes from one host to others, from here or to here."""
        return digest in self._owners or self.server.owns(digest)

    def take(self, digest: str, buffer: memoryview, stop: threading.Event) -> bool:
        """Fills the buffer, exactly as long as the chunk, from the chunk's owner, and proves it. False: the store must
        give it, and the buffer's content is undefined. Raises TransferStopped."""
        peer = self._owners.get(digest)
        ends = time.monotonic() + LONGEST_WAIT_SECONDS
        while peer is not None and self._is_asked(peer):
            check_stop(stop)
            try:
                status = self._ask(peer, digest, buffer, stop)
                if status is HTTPStatus.SERVICE_UNAVAILABLE and time.monotonic() >= ends:
                    raise TimeoutError(f"it has not had a chunk for {LONGEST_WAIT_SECONDS:.0f} s")
            except (OSError, HTTPException, ChunkCorrupt) as error:
                self._drop(peer, error)
                return False
            if status is HTTPStatus.OK:
                with self._lock:
                    self.taken_bytes += buffer.nbytes
                return True
            if status is HTTPStatus.NOT_FOUND:
                return False
        return False

    def _ask(self, peer: PeerAddress, digest: str, buffer: memoryview, stop: threading.Event) -> HTTPStatus:
        with closing(HTTPConnection(peer.host, peer.port, timeout=CONNECT_SECONDS)) as connection:
            connection.connect()
            self._has_reached_one = True
            connection.sock.settimeout(SILENCE_SECONDS)
            connection.request("GET", _PATH + digest, headers={"Authorization": f"Bearer {peer.token}"})
            response = connection.getresponse()
            if response.status in (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE):
                return HTTPStatus(response.status)
            if response.status != HTTPStatus.OK:
                raise HTTPException(f"it answers {response.status}")
            ends = time.monotonic() + SILENCE_SECONDS + buffer.nbytes / SLOWEST_BYTES_PER_SECOND

            def read_into(block: memoryview) -> int:
                if time.monotonic() >= ends:
                    raise TimeoutError("it sends too slowly")
                arrived = response.read1(block.nbytes)  # readinto would wait for the whole block
                block[: len(arrived)] = arrived
                return len(arrived)

            receiver = Receiver(buffer, digest)
            receiver.expect(-1 if response.length is None else response.length)
            receiver.fill(read_into, stop)
            receiver.finish()
            return HTTPStatus.OK

    def _is_asked(self, peer: PeerAddress) -> bool:
        with self._lock:
            if peer in self._dropped:
                return False
            return self._has_reached_one or len({each.host for each in self._dropped}) < UNREACHABLE_HOSTS

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
            family, kind, _, _, where = _resolved(towards, socket.SOCK_DGRAM)
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                address = str(probe.getsockname()[0])
            if not address.startswith("127.") and address != "::1":
                return address
    return None


def _resolved(host: str, kind: socket.SocketKind) -> Any:
    """As the first of `socket.getaddrinfo`. Raises OSError, also for what cannot be a name, such as `10.0.0..1`."""
    try:
        return socket.getaddrinfo(host, 9, type=kind)[0]  # any port: the address counts
    except UnicodeError as error:
        raise OSError(f"{host!r} is no address ({error})") from error
