"""Where agents of other hosts, and ranks of their jobs, reach this agent: HTTP, with this agent's token.

    GET  /chunks/<digest>  the bytes, from the memory that they lie in, or 404
    POST /find             Find -> Found
    POST /offers           Offer -> 204; it is copied later, or not

The token is 256 random bits, new with each agent. It travels from rank to rank with the collectives of a job. Bytes are
proven by those who read them.
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
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from pydantic import ValidationError

from holdfast_client.agent.memory_tier import MemoryTier
from holdfast_client.agent.messages import Find, Found, Offer
from holdfast_client.agent.peer_chunks import CHUNKS, FIND, OFFERS, SILENCE_SECONDS
from holdfast_client.chunks.peers import PeerAddress
from holdfast_protocol.base import RunName

log = logging.getLogger("holdfast.agent")

_MOST_QUESTION_BYTES = 64 * 1024**2
_MOST_REQUESTS = 64
"""Answered at once; others wait in the system's queue."""
_REST_SECONDS = 0.5


class PeerServer:
    """Answers from its construction on, on threads of its own. Raises OSError if it cannot listen there."""

    def __init__(self, host: str, port: int, tier: MemoryTier, on_offer: Callable[[Offer], None]) -> None:
        """`host`: the address that it listens on, which other hosts can reach. `port` 0: the system chooses."""
        self.tier = tier
        self.on_offer = on_offer
        self._token = secrets.token_hex(32)
        self._listener = _Listener(host, port, self)
        self.address = PeerAddress(host, int(self._listener.server_address[1]), self._token)
        threading.Thread(target=self._listener.serve_forever, name="holdfast-agent-peers", daemon=True).start()

    def is_known(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def close(self) -> None:
        """No new request is taken. Those that run end with their socket's time-out, or the process."""
        self._listener.shutdown()
        self._listener.server_close()


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, peer: PeerServer) -> None:
        try:
            self.address_family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except UnicodeError as error:  # of what cannot be a name
            raise OSError(f"{host!r} is no address ({error})") from error
        self.peer = peer
        self._free = threading.Semaphore(_MOST_REQUESTS)
        super().__init__((str(where[0]), port), _Request)

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is free, and the peer that waits would wake this loop at once
            time.sleep(_REST_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self._free.acquire()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a peer has left: %s", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    """One request on a connection of its own."""

    server: _Listener
    timeout = SILENCE_SECONDS

    def do_GET(self) -> None:
        if not self._is_known() or not self.path.startswith(CHUNKS):
            self._say(HTTPStatus.FORBIDDEN)
            return
        with self.server.peer.tier.opened(self.path.removeprefix(CHUNKS)) as found:
            if found is None:
                self._say(HTTPStatus.NOT_FOUND)
            elif isinstance(found, bytes):
                self._say(HTTPStatus.OK, len(found))
                self.wfile.write(found)
            else:
                descriptor, chunk = found
                self._say(HTTPStatus.OK, chunk.bytes)
                with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as memory:
                    if chunk.bytes:
                        self.connection.sendfile(memory, chunk.start, chunk.bytes)

    def do_POST(self) -> None:
        peer = self.server.peer
        size = int(self.headers.get("Content-Length") or 0)
        if not self._is_known() or not 0 <= size <= _MOST_QUESTION_BYTES:
            self._say(HTTPStatus.FORBIDDEN)
            return
        body = self.rfile.read(size)
        try:
            if self.path == FIND:
                asked = Find.model_validate_json(body)
                sizes = peer.tier.sizes(RunName(asked.project, asked.run), asked.digests)
                answer = Found(bytes=sizes).model_dump_json().encode()
                self._say(HTTPStatus.OK, len(answer))
                self.wfile.write(answer)
            elif self.path == OFFERS:
                peer.on_offer(Offer.model_validate_json(body))
                self._say(HTTPStatus.NO_CONTENT)
            else:
                self._say(HTTPStatus.NOT_FOUND)
        except ValidationError as error:
            log.warning("an agent of another host says what this version does not know: %s", error.errors()[0]["msg"])
            self._say(HTTPStatus.BAD_REQUEST)

    def _is_known(self) -> bool:
        return self.server.peer.is_known(self.headers.get("Authorization", ""))

    def _say(self, status: HTTPStatus, size: int = 0) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, *said: Any) -> None:
        log.debug(*said)
