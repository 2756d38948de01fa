"""Connections that do not say what they want cost little and not for long (protocol rule 43).

uvicorn waits for the head of a request for ever, and refuses new callers while idle ones fill its limit. Here a head
has `header_seconds`, and so has what is left of a body that was refused; and a connection too many takes the place of
the one that has been without a request for the longest. Only where each has a request in hand is the new one refused.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def bounded_connections(header_seconds: float, most: int) -> type[H11Protocol]:
    """For `uvicorn.Config(http=…)`; one for each server."""
    waiting: dict[BoundedConnection, None] = {}  # without a request in hand, the longest first

    class BoundedConnection(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                self._make_room()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._has_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # uvicorn's own time for idle connections runs now, until the next byte comes.
            if not self._busy() and not self.transport.is_closing():
                waiting[self] = None

        def _busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _look(self) -> None:
            if self._busy() or self.transport.is_closing():
                self._has_request()
                return
            waiting.setdefault(self, None)
            if self._deadline is None:
                self._deadline = self.loop.call_later(header_seconds, self.transport.abort)

        def _has_request(self) -> None:
            waiting.pop(self, None)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _make_room(self) -> None:
            idle = next(iter(waiting), None)
            if idle is None:
                self.transport.write(_FULL)
                self.transport.close()
            else:
                idle.transport.abort()
                waiting.pop(idle)

    return BoundedConnection
