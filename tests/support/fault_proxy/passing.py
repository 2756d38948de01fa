"""Passes requests on and carries the faults out: one thread for each connection, and for each request a connection of
its own to the server.

Headers and paths go through as they are, `Host` too: a signed URL is signed for the host that its sender was told.
Query strings are passed on and never kept: they are secrets.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tests.support.fault_proxy.faults import (
    Answer,
    BlackHole,
    CutBefore,
    CutReply,
    CutRequest,
    Delay,
    DropReply,
    Garble,
    Held,
    Throttle,
)

if TYPE_CHECKING:
    from tests.support.fault_proxy.proxy import FaultProxy, Seen

_PIECE_BYTES = 16 * 1024
_SERVER_SECONDS = 120.0
_LOOK_SECONDS = 0.01
_RESET = struct.pack("ii", 1, 0)


class Listener(ThreadingHTTPServer):
    """The proxy while it takes connections. `end` leaves no thread and no connection behind."""

    request_queue_size = 128
    daemon_threads = False  # so that server_close() joins them

    def __init__(self, proxy: FaultProxy) -> None:
        super().__init__(("127.0.0.1", proxy.port), _Handler)
        self.proxy = proxy
        self.ended = threading.Event()
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), name="fault-proxy", daemon=True)
        self._thread.start()

    def hold(self, connection: socket.socket) -> None:
        """Ended with the listener, if not before."""
        with self._open_lock:
            self._open.add(connection)
        if self.ended.is_set():
            _end(connection)

    def let_go(self, connection: socket.socket) -> None:
        with self._open_lock:
            self._open.discard(connection)

    def end(self) -> None:
        self.ended.set()
        self.shutdown()
        self._thread.join()
        with self._open_lock:
            for connection in self._open:
                _end(connection)
        self.server_close()

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        self.let_go(request)
        request.close()  # without shutdown(), which would say an orderly goodbye where a reset is wanted

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle is what this is about."""


class _Cut(Exception):
    """The client's connection is over."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def setup(self) -> None:
        super().setup()
        self.server.hold(self.connection)

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        # What the control plane says decides which call it is; the store's bytes go through as they come.
        said = self.rfile.read(length) if "json" in self.headers.get("Content-Type", "") else None
        url = urlsplit(self.path)
        seen = self.server.proxy.met(self.command, url.path, said, by_url="X-Amz-Signature=" in url.query)
        pieces = _cut_up(said) if said is not None else self._incoming(length)
        self.close_connection = True
        try:
            self._do(seen, pieces, length)
        except _Cut:
            return
        self.close_connection = self.headers.get("Connection", "").lower() == "close"

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _serve

    def _do(self, seen: Seen, body: Iterator[bytes], length: int) -> None:
        match seen.fault:
            case Delay(seconds):
                self._pause(seconds)
            case Held(until):
                while not until.is_set():
                    self._pause(_LOOK_SECONDS)
            case CutBefore():
                self._reset()
            case BlackHole(seconds):
                self._pause(seconds)
                raise _Cut
            case Answer() as answer:
                for _ in body:
                    pass
                self._answer(answer)
                return
            case Throttle(bytes_per_second):
                body = self._slowly(body, bytes_per_second)
            case Garble():
                body = _garbled(body)
            case CutRequest(part):
                body = _first(body, int(length * part))
        self._pass_on(seen, body)

    def _answer(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def _pass_on(self, seen: Seen, body: Iterator[bytes]) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.proxy.server_port, timeout=_SERVER_SECONDS)
        try:
            upstream.connect()
            self.server.hold(upstream.sock)
            reply = self._ask(upstream, seen, body)
            self.server.proxy.answered(seen, reply.status)
            self._reply(seen, reply)
        except (OSError, http.client.HTTPException):
            raise _Cut from None
        finally:
            if upstream.sock is not None:
                self.server.let_go(upstream.sock)
            upstream.close()

    def _ask(self, upstream: http.client.HTTPConnection, seen: Seen, body: Iterator[bytes]) -> http.client.HTTPResponse:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "connection":
                upstream.putheader(name, value)
        upstream.putheader("Connection", "close")
        upstream.endheaders()
        try:
            for piece in body:
                upstream.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            # It has answered before it had everything. What the client still sends is read, or its own sending would
            # fail before it can read the answer.
            for _ in body:
                pass
        if isinstance(seen.fault, CutRequest):
            upstream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._reset()
        return upstream.getresponse()

    def _reply(self, seen: Seen, reply: http.client.HTTPResponse) -> None:
        if isinstance(seen.fault, DropReply):
            reply.read()
            raise _Cut
        has_body = self.command != "HEAD" and reply.status not in (204, 304)
        if isinstance(seen.fault, CutReply) and (not has_body or reply.length == 0):
            self.wfile.write(b"HTTP/1.1 20")
            raise _Cut
        self.send_response_only(reply.status, reply.reason)
        for name, value in reply.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        chunked = has_body and reply.length is None
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if not has_body:
            return
        pieces: Iterator[bytes] = iter(lambda: reply.read1(_PIECE_BYTES), b"")
        match seen.fault:
            case Throttle(bytes_per_second):
                pieces = self._slowly(pieces, bytes_per_second)
            case Garble() if self.command == "GET":
                pieces = _garbled(pieces)
            case CutReply(part):
                pieces = _first(pieces, int((reply.length or 2) * part))
        for piece in pieces:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if isinstance(seen.fault, CutReply):
            raise _Cut
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _incoming(self, length: int) -> Iterator[bytes]:
        while length:
            piece = self.rfile.read1(min(length, _PIECE_BYTES))
            if not piece:
                raise _Cut
            length -= len(piece)
            yield piece

    def _slowly(self, pieces: Iterator[bytes], bytes_per_second: float) -> Iterator[bytes]:
        began, passed = time.monotonic(), 0
        for piece in pieces:
            passed += len(piece)
            self._pause(began + passed / bytes_per_second - time.monotonic())
            yield piece

    def _pause(self, seconds: float) -> None:
        if seconds > 0 and self.server.ended.wait(seconds):
            raise _Cut

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        raise _Cut

    def log_message(self, *_: object) -> None:
        pass


def _cut_up(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]


def _first(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    for piece in pieces:
        if count <= 0:
            return
        yield piece[:count]
        count -= len(piece)


def _garbled(pieces: Iterator[bytes]) -> Iterator[bytes]:
    for number, piece in enumerate(pieces):
        yield piece if number else bytes([piece[0] ^ 1]) + piece[1:]


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself
