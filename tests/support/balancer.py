"""A balancer on loopback that knows no callers: each request goes to the next service.

As reverse proxies do, it asks another service only if none has got the request; one that was cut off is a 502.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import urllib3

_OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class Balancer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, services: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.pool = urllib3.PoolManager(maxsize=256, retries=False)
        self._services = services
        self._next = itertools.count()

    def turn(self) -> list[str]:
        """All services, another one first each time."""
        first = next(self._next) % len(self._services)
        return [*self._services[first:], *self._services[:first]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Balancer

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = self._reply(body)
        self.send_response(502 if reply is None else reply.status)
        if reply is not None:
            for name, value in reply.headers.items():
                if name.lower() not in _OF_ONE_CONNECTION:
                    self.send_header(name, value)
        data = b"" if reply is None else reply.data
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _reply(self, body: bytes) -> urllib3.BaseHTTPResponse | None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
        for service in self.server.turn():
            try:
                return self.server.pool.request(
                    self.command,
                    service + self.path,
                    body=body,
                    headers=headers,
                    redirect=False,
                    timeout=120,
                    decode_content=False,
                )
            except urllib3.exceptions.NewConnectionError:
                continue
            except urllib3.exceptions.HTTPError:
                return None
        return None

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on


@contextmanager
def balancer(services: Sequence[str]) -> Iterator[Balancer]:
    running = Balancer(services)
    thread = threading.Thread(target=running.serve_forever, name="balancer", daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.shutdown()
        running.server_close()
        thread.join()
