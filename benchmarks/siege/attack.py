"""What attacks: python -m benchmarks.siege.attack PORT CONNECTIONS FLOOD_PER_SECOND GREEDY_TOKEN. Ends when its stdin
does.

One thread and a selector: 10,000 sockets and a flood must cost less here than at the service. It prints what it has
done as a line of JSON, twice a second. Each kind of attacker calls from an address of its own, as on a network.
"""

from __future__ import annotations

import contextlib
import json
import resource
import selectors
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.measure import take_what_is_left

HALVES_FROM, WRONG_FROM, GREEDY_FROM, FLOOD_FROM = "127.0.0.66", "127.0.0.67", "127.0.0.68", "127.0.0.69"
SPARE_FILES = 200
_HALF = b"POST /v1/projects HTTP/1.1\r\nHost: localhost\r\nX-Half: "
_WRONG_TOKENS, _GREEDY_CALLS = 8, 64
_TELL_SECONDS = 0.5
_AT_ONCE = 200
"""So many new connections in a turn: the flood and the greedy calls go on beside them."""
_AGAIN_PER_SECOND = 200
"""A connection that was cut off is made again, so many a second."""


@dataclass(eq=False)
class _Half:
    """A connection that never ends its head."""


@dataclass(eq=False)
class _Caller:
    """Sends its request again when the last one was answered, refused or cut off."""

    kind: str
    source: str
    request: bytes
    come: bytearray = field(default_factory=bytearray)


def possible_connections(wanted: int) -> int:
    """As many as the hard limit of open files lets one process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted + SPARE_FILES if hard == resource.RLIM_INFINITY else min(wanted + SPARE_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(wanted, allowed - SPARE_FILES)


class Attack:
    def __init__(self, port: int, connections: int, flood_per_second: float, greedy_token: str) -> None:
        """Of the wrong tokens eight wait for their refusals. `flood_per_second` more hang up, each on a connection of
        its own: who waits for no answer is slowed down by none."""
        self._at = ("127.0.0.1", port)
        self._wanted = connections
        self._flood_per_second = flood_per_second
        self._flooded_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self.counted: Counter[str] = Counter()
        self._again_from = time.monotonic()
        self._wrong = _request("/v1/service", f"hold_{'a1' * 8}_{'0123456789abcdef' * 4}")
        for _ in range(_WRONG_TOKENS):
            self._connect(_Caller("wrong", WRONG_FROM, self._wrong))
        for _ in range(_GREEDY_CALLS):
            self._connect(_Caller("greedy", GREEDY_FROM, _request("/v1/projects/greedy/runs", greedy_token)))
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)

    def go_on(self) -> None:
        tell_at = 0.0
        while True:
            self._more_halves()
            self._flood()
            for key, _ in self._selector.select(0.05):
                if key.data is None:
                    return
                self._hear(key.fileobj, key.data)
            if time.monotonic() >= tell_at:
                tell_at = time.monotonic() + _TELL_SECONDS
                print(json.dumps(dict(self.counted)), flush=True)

    def _more_halves(self) -> None:
        first = self._wanted - self.counted["halves opened"]
        if first > 0:
            missing = min(first, _AT_ONCE)
        else:
            now = time.monotonic()
            missing = min(self._wanted - self.counted["halves open"], int((now - self._again_from) * _AGAIN_PER_SECOND))
            if missing <= 0:
                return
        self._again_from = time.monotonic()
        for _ in range(missing):
            if self._connect(_Half()):
                self.counted["halves opened"] += 1
                self.counted["halves open"] += 1

    def _flood(self) -> None:
        due = int((time.monotonic() - self._flooded_at) * self._flood_per_second)
        self._flooded_at += due / self._flood_per_second if self._flood_per_second else 0.0
        for _ in range(min(due, _AT_ONCE)):
            with socket.socket() as connection:
                try:
                    self._reach(connection, FLOOD_FROM)
                    connection.sendall(self._wrong)
                except OSError:
                    self.counted["not connected"] += 1
                else:
                    self.counted["wrong hung up"] += 1

    def _reach(self, connection: socket.socket, source: str) -> None:
        # The kernel chooses the port when it connects: it may be one that goes to another server, too.
        connection.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        connection.bind((source, 0))
        connection.settimeout(30)
        connection.connect(self._at)

    def _connect(self, who: _Half | _Caller) -> bool:
        connection = socket.socket()
        try:
            self._reach(connection, HALVES_FROM if isinstance(who, _Half) else who.source)
            if isinstance(who, _Half):
                connection.sendall(_HALF)
            else:
                self._send(connection, who)
            connection.setblocking(False)
        except OSError:
            self.counted["not connected"] += 1
            connection.close()
            return False
        self._selector.register(connection, selectors.EVENT_READ, who)
        return True

    def _hear(self, connection: object, who: _Half | _Caller) -> None:
        assert isinstance(connection, socket.socket)
        try:
            piece = connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._selector.unregister(connection)
            connection.close()
            if isinstance(who, _Half):
                self.counted["halves open"] -= 1
                self.counted["halves cut off"] += 1
            else:
                self.counted[f"{who.kind} cut off"] += 1
                who.come.clear()
                self._connect(who)
            return
        if isinstance(who, _Caller):
            who.come += piece
            self._call_again(connection, who)

    def _call_again(self, connection: socket.socket, who: _Caller) -> None:
        head, end, body = bytes(who.come).partition(b"\r\n\r\n")
        if not end:
            return
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        if len(body) < length:
            return
        self.counted[f"{who.kind} {head[9:12].decode()}"] += 1
        who.come.clear()
        with contextlib.suppress(OSError):  # it is heard of at the next turn
            self._send(connection, who)

    def _send(self, connection: socket.socket, who: _Caller) -> None:
        connection.sendall(who.request)
        self.counted[f"{who.kind} sent"] += 1


def _request(path: str, token: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


if __name__ == "__main__":
    take_what_is_left()  # on a network the attackers have cores of their own
    port, connections, flood, token = sys.argv[1:]
    Attack(int(port), possible_connections(int(connections)), float(flood), token).go_on()
