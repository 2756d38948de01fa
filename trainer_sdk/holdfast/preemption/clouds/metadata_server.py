"""One request to the metadata server of this machine: plain HTTP to an address that only the machine itself reaches.

The standard library's client, because it ignores proxies (a proxy would answer for another machine) and follows no
redirects. A connection per request, because there are few, and none is then left half dead.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

BASE_URL = "http://169.254.169.254"
"""The same for all three clouds. Google's has a name too, but resolving it would need a name server."""

_LARGEST_REPLY_BYTES = 1 << 20


class MetadataError(Exception):
    """The metadata server does not answer, or answers wrongly. The text says how, for one line in the log."""


@dataclass(frozen=True)
class MetadataReply:
    status: int
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace").strip()

    @property
    def now(self) -> float:
        """Seconds since 1970 by the server's clock, else by ours, because the server's deadlines go by its own
        clock."""
        try:
            return parsedate_to_datetime(self.headers["Date"]).timestamp()
        except (TypeError, ValueError):
            return time.time()

    def require_ok(self, what: str) -> MetadataReply:
        if self.status != http.HTTPStatus.OK:
            raise MetadataError(f"{what} answered {self.status}")
        return self


class MetadataServer:
    """`base_url`: `http://host[:port]`. For one thread, and `close()` from any other."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._connection: http.client.HTTPConnection | None = None
        self._closed = False

    def ask(
        self, target: str, headers: dict[str, str], *, method: str = "GET", timeout_seconds: float = 2.0
    ) -> MetadataReply:
        """Raises MetadataError if no whole answer comes in time, and after close()."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_seconds)
        self._connection = connection
        try:
            connection.connect()
            if self._closed:
                raise MetadataError("the poller has ended")
            connection.request(method, target, headers=headers)
            reply = connection.getresponse()
            return MetadataReply(reply.status, reply.headers, reply.read(_LARGEST_REPLY_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(
                f"{self._host}:{self._port} does not answer ({error or type(error).__name__})"
            ) from None
        finally:
            self._connection = None
            connection.close()

    def close(self) -> None:
        """Ends the running request at once."""
        self._closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
