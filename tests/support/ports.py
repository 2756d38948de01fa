"""Free TCP ports on loopback for servers that are started, killed and started again."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

# Below Linux's ephemeral range (32768 and up), so that no outgoing connection takes the port of a server that is
# down for a moment; and low enough that a companion at +10000 stays below it too.
_LOWEST, _HIGHEST = 12_000, 22_000
_TRIES = 200
# A server takes its port some time after it was chosen, and again after it was down. Meanwhile the port is free, so the
# test processes of one run share the range out, and each gives no port again for a while.
_GIVEN: deque[int] = deque(maxlen=200)


def free_ports(count: int = 1, *, companion_offset: int | None = None) -> int:
    """The first of `count` consecutive ports that nobody listens on, with `port + companion_offset` free as well."""
    choice, (lowest, highest) = random.SystemRandom(), _share()
    for _ in range(_TRIES):
        first = choice.randrange(lowest, highest - count)
        ports = list(range(first, first + count))
        wanted = [*ports, *(port + companion_offset for port in ports if companion_offset is not None)]
        if not set(ports) & set(_GIVEN) and all(_is_free(port) for port in wanted):
            _GIVEN.extend(ports)
            return first
    raise RuntimeError(f"found no {count} free ports between {lowest} and {highest} in {_TRIES} tries")


def _share() -> tuple[int, int]:
    """Of this test process, and of those that it starts."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = (_HIGHEST - _LOWEST) // count
    lowest = _LOWEST + number % count * size  # one that stands in for a process that died has a number above them
    return lowest, lowest + size


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
