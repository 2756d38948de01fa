"""A strict little HTTP server for the client's tests: it does what the test's function says, faults included.

It refuses (500, which no test expects) a request whose body is not exactly as long as announced.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from holdfast_protocol.problems import PROBLEM_KINDS, ProblemCode


@dataclass
class Seen:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class Reply:
    """`sent_bytes`: cut the body (and the connection) after so many. `drop`: cut it without any reply."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    sent_bytes: int | None = None
    drop: bool = False
    protocol: str | None = PROTOCOL_VERSION


DROP = Reply(drop=True)


def as_json(value, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


def problem(code: str, detail: str = "It is so. Do this.", *, status: int | None = None, **context) -> Reply:
    kind = PROBLEM_KINDS.get(ProblemCode(code)) if code in list(ProblemCode) else None
    status = status or (kind.status if kind else 409)
    return as_json(
        {
            "type": f"https://holdfast.dev/problems/{code}",
            "title": kind.title if kind else "Something new",
            "status": status,
            "code": code,
            "detail": detail,
            "retryable": bool(kind and kind.retryable),
            "request_id": "req-of-the-service",
            "context": context,
        },
        status,
    )


class ScriptedServer:
    def __init__(self, answer: Callable[[Seen], Reply], tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.seen: list[Seen] = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                headers = {name.lower(): value for name, value in self.headers.items()}
                seen = Seen(self.command, parts.path, query, headers, body)
                with outer._lock:
                    outer.seen.append(seen)
                strict = len(body) == length and "transfer-encoding" not in headers
                reply = outer.answer(seen) if strict else Reply(500, b"not strict")
                self._send(reply)

            def _send(self, reply: Reply) -> None:
                if reply.drop:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                # The other one sends the time of this machine by itself.
                (self.send_response_only if "Date" in reply.headers else self.send_response)(reply.status)
                if reply.protocol is not None:
                    self.send_header(PROTOCOL_HEADER, reply.protocol)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in reply.headers:
                    self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body[: reply.sent_bytes])
                if reply.sent_bytes is not None:
                    self.close_connection = True

            do_HEAD = do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = _serve

            def log_message(self, *args) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def of(self, method: str, path: str) -> list[Seen]:
        return [seen for seen in self.seen if (seen.method, seen.path) == (method, path)]


@contextmanager
def scripted(answer: Callable[[Seen], Reply]) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer)
    try:
        yield server
    finally:
        server.close()


def in_turn(*replies: Reply) -> Callable[[Seen], Reply]:
    """The replies one after the other; the last one for ever."""
    left = list(replies)
    return lambda seen: left.pop(0) if len(left) > 1 else left[0]
