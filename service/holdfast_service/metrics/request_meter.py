"""Counts requests by route and status, and their time. Pure ASGI; by the route's template, never by the path: a path
holds ids, and each would be a time series of its own."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# A commit with many ranks takes tens of milliseconds, a long poll up to a minute.
_BUCKETS_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


# What a client may call its method is up to the client, and each would be a time series of its own too.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestMeter:
    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "holdfast_requests", "Requests, by route and status.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "holdfast_request_seconds",
            "Time from the request's first byte to the reply's last.",
            ("method", "route"),
            buckets=_BUCKETS_SECONDS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # what the frame answers, should nothing be sent from inside

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        begun = time.monotonic()
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(method, route, str(status)).inc()
            self._seconds.labels(method, route).observe(time.monotonic() - begun)
