"""A relay of TCP connections on loopback that can freeze: it accepts, and passes nothing on, as a dead host does. It
counts what comes back, and can bound its rate."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast_client.chunks.connections import RateLimit


class TcpRelay:
    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._passing = threading.Event()
        self._passing.set()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.answered_bytes = 0
        self.answers = RateLimit()
        """Of all connections together."""
        self._counting = threading.Lock()
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        self._passing.clear()

    def thaw(self) -> None:
        self._passing.set()

    def close(self) -> None:
        self._closed = True
        self._passing.set()
        self._listening.close()
        for each in list(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._closed:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._sockets |= {near, far}
                threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        """Until both ways have ended. A job of many ranks makes more connections than a process has descriptors."""
        back = threading.Thread(target=self._pass_on, args=(far, near, True), daemon=True)
        back.start()
        self._pass_on(near, far, False)
        back.join()
        for each in (near, far):
            self._sockets.discard(each)
            each.close()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._passing.wait()
                if is_answer:
                    self.answers.acquire(len(data), None)
                    with self._counting:
                        self.answered_bytes += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextmanager
def tcp_relay(host: str, port: int) -> Iterator[TcpRelay]:
    relay = TcpRelay(host, port)
    try:
        yield relay
    finally:
        relay.close()
