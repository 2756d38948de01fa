"""Free TCP ports on loopback for servers that are started, killed and started again."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range (32768 and up), so that no outgoing connection takes the port of a server that is
# down for a moment; and low enough that a companion at +10000 stays below it too.
_LOWEST, _HIGHEST = 12_000, 22_000
_TRIES = 200


def free_ports(count: int = 1, *, companion_offset: int | None = None) -> int:
    """The first of `count` consecutive ports that nobody listens on, with `port + companion_offset` free as well."""
    choice = random.SystemRandom()
    for _ in range(_TRIES):
        first = choice.randrange(_LOWEST, _HIGHEST - count)
        wanted = list(range(first, first + count))
        if companion_offset is not None:
            wanted += [port + companion_offset for port in wanted]
        if all(_is_free(port) for port in wanted):
            return first
    raise RuntimeError(f"found no {count} free ports between {_LOWEST} and {_HIGHEST} in {_TRIES} tries")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
