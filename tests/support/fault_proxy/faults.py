"""What can happen to one request on its way: plain descriptions, which proxy.py carries out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Delay:
    """Held back before it is passed on, and then served as ever."""

    seconds: float


@dataclass(frozen=True)
class Held:
    """Held back until this is set, and then served as ever."""

    until: threading.Event


@dataclass(frozen=True)
class CutBefore:
    """The connection is reset when the request's head has come. The server hears nothing of it."""


@dataclass(frozen=True)
class CutRequest:
    """Both connections are reset when this part of the body has gone through."""

    part: float = 0.5


@dataclass(frozen=True)
class DropReply:
    """The server has done it all and has replied, and the client hears only that the connection has ended."""


@dataclass(frozen=True)
class CutReply:
    """The connection ends in this part of the reply's body; of a reply without a body, in its first line."""

    part: float = 0.5


@dataclass(frozen=True)
class Garble:
    """One bit of a body of the store's is another one on the other side: of the request's, or of a reply to a GET."""


@dataclass(frozen=True)
class Throttle:
    """Bodies trickle, both ways."""

    bytes_per_second: float


@dataclass(frozen=True)
class Answer:
    """Somebody before the server answers in its place. The server hears nothing of it."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BlackHole:
    """Nothing comes back and the connection stays open, for so long; then it ends."""

    seconds: float = 3600.0


Fault: TypeAlias = Delay | Held | CutBefore | CutRequest | DropReply | CutReply | Garble | Throttle | Answer | BlackHole

BAD_GATEWAY = Answer(502, b"<html>Bad Gateway</html>", {"Content-Type": "text/html"})
INTERNAL_ERROR = Answer(500, b"<html>Internal Server Error</html>", {"Content-Type": "text/html"})
SLOW_DOWN = Answer(
    503,
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>SlowDown</Code><Message>Please reduce your request rate.'
    b"</Message></Error>",
    {"Content-Type": "application/xml"},
)
TOO_MANY_REQUESTS = Answer(429, b"", {"Retry-After": "1"})
