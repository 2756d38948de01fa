"""An application called in the test's own process: httpx without a socket.

Requests run beside each other as behind uvicorn: all of them on one event loop in a thread of its own, their handlers
in that loop's threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.types import ASGIApp

LOOP_THREAD = "in process"
"""The name of the thread that the event loop runs in."""


class InProcessTransport(httpx.BaseTransport):
    """Thread-safe; any number of clients can share one."""

    def __init__(self, app: ASGIApp, portal: BlockingPortal) -> None:
        self._asgi = httpx.ASGITransport(app)
        self._portal = portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        asked = self._portal.start_task_soon(self._answer, request)
        try:
            return asked.result(request.extensions.get("timeout", {}).get("read"))
        except FutureTimeoutError:
            asked.cancel()
            raise httpx.ReadTimeout("the application did not answer in time", request=request) from None

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        """The reply as it would arrive over a connection: one that is not whole is an error."""
        try:
            reply = await self._asgi.handle_async_request(request)
        except Exception as error:
            # The application turns every exception into a reply; what comes here came when half of one was out.
            raise httpx.RemoteProtocolError("the application broke off its reply", request=request) from error
        assert isinstance(reply.stream, httpx.AsyncByteStream)
        body = b"".join([part async for part in reply.stream])
        told = reply.headers.get("Content-Length")
        if told is not None and request.method != "HEAD" and int(told) != len(body):
            raise httpx.RemoteProtocolError(f"{len(body)} bytes of {told} arrived", request=request)
        return httpx.Response(reply.status_code, headers=reply.headers, stream=httpx.ByteStream(body))


@contextmanager
def in_process(app: ASGIApp) -> Iterator[InProcessTransport]:
    """At the end those who wait for a reply are cut off, and handlers at work end first."""
    with start_blocking_portal(name=LOOP_THREAD) as portal:
        try:
            yield InProcessTransport(app, portal)
        finally:
            portal.call(portal.stop, True)
