"""The connections of `holdfast serve`: how long each may take to say what it wants, how many there are, and TLS.

For `uvicorn.Config(http=…)`. uvicorn makes one protocol object for each connection that it accepts.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTION = "holdfast_connection"
"""Under this name a request's scope holds its BoundedConnection, where there is a connection."""
STREAMS = "holdfast_streams"
"""Under this name it says that the reply goes on for as long as somebody reads."""

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# Clients that keep connections for later do not read that the service closes one, and do not answer.
_TLS_CLOSES_WITHIN_SECONDS = 5.0


def bounded_connections(
    header_seconds: float, most: int, tls: Callable[[], ssl.SSLContext] | None = None
) -> Callable[..., asyncio.BaseProtocol]:
    """One for each server. Connections that do not say what they want cost little and not for long (rule
    limits-before-work). `tls` is asked for each new connection, so a renewed certificate is that of the next one.

    uvicorn waits for the head of a request for ever, and refuses new callers while idle ones fill its limit. Here a
    head has `header_seconds`, and so has a TLS handshake before it, and what is left of a body that was refused. A
    connection too many takes the place of the longest one without a request; only if each has a request in hand is the
    new one refused.
    """
    accepted: set[BoundedConnection] = set()
    # Without a request in hand, the longest first, and how each is cut off.
    waiting: dict[BoundedConnection, Callable[[], None]] = {}

    def has_room(connection: BoundedConnection, cut_off: Callable[[], None]) -> bool:
        accepted.add(connection)
        if len(accepted) > most:
            idle = next(iter(waiting), None)
            if idle is None:
                return False
            waiting.pop(idle)()
        waiting[connection] = cut_off
        return True

    def is_over(connection: BoundedConnection) -> None:
        accepted.discard(connection)
        waiting.pop(connection, None)

    class BoundedConnection(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        ending: asyncio.Event
        """Set when the server ends."""
        has_shown_certificate: bool
        """One that TLS has verified."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.ending = asyncio.Event()
            self.has_shown_certificate = bool(transport.get_extra_info("peercert"))
            if self not in accepted and not has_room(self, transport.abort):
                self.transport.write(_FULL)
                self.transport.close()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._has_request()
            is_over(self)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._name_itself()
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._name_itself()  # a next request that came with the first one
            # uvicorn's own time for idle connections runs now, until the next byte comes.
            if not self._busy() and not self.transport.is_closing():
                waiting[self] = self.transport.abort

        def shutdown(self) -> None:
            self.ending.set()
            if self._busy() and self.scope.get(STREAMS) and self.flow.write_paused:
                self.transport.abort()  # nobody reads what is to be sent before the end
            super().shutdown()

        def _name_itself(self) -> None:
            """Before the application has the request."""
            scope: dict[str, Any] | None = self.scope  # type: ignore[assignment]
            if scope is not None:
                scope.setdefault(CONNECTION, self)

        def _busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _look(self) -> None:
            if self._busy() or self.transport.is_closing():
                self._has_request()
                return
            waiting.setdefault(self, self.transport.abort)
            if self._deadline is None:
                self._deadline = self.loop.call_later(header_seconds, self.transport.abort)

        def _has_request(self) -> None:
            waiting.pop(self, None)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    if tls is None:
        return BoundedConnection
    newest_context = tls

    class SecuredConnection(SSLProtocol):
        """asyncio's own TLS around a BoundedConnection. `loop.create_server(ssl=…)` would keep one context for ever,
        and would not count what has not ended its handshake."""

        def __init__(self, connection: BoundedConnection) -> None:
            super().__init__(
                connection.loop,
                connection,
                newest_context(),
                None,  # type: ignore[arg-type]  # nobody waits for the handshake
                server_side=True,
                ssl_handshake_timeout=header_seconds,  # type: ignore[arg-type]  # asyncio takes fractions
                ssl_shutdown_timeout=_TLS_CLOSES_WITHIN_SECONDS,
            )
            self._inside = connection

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            assert isinstance(transport, asyncio.Transport)
            if not has_room(self._inside, transport.abort):
                transport.abort()

        def connection_lost(self, exc: BaseException | None) -> None:
            super().connection_lost(exc)
            is_over(self._inside)  # the one inside hears of it only if it was told that it is connected

    def secured(**given: Any) -> SecuredConnection:
        return SecuredConnection(BoundedConnection(**given))

    return secured
