"""One serving process: the application behind uvicorn, the controllers beside it, until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from holdfast_service.app import create_app
from holdfast_service.background.registry import Background, loops_of
from holdfast_service.context import ServiceContext
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.web.frame import bounded_connections
from holdfast_service.worker import refuse_sqlite

# Longer than a trainer pauses between two calls, so that its connections are not closed under it.
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048


class PortInUseError(RuntimeError):
    """The address cannot be listened on."""


def serve(settings: ServiceSettings, on_ready: Callable[[ServiceContext, str], None]) -> None:
    """Returns after the requests in flight have ended. `on_ready` is told where it listens, before the first request.

    Raises PortInUseError, SettingsError and ProblemError(`database_unavailable`).
    """
    listening = _listen(settings.host, settings.port)
    with contextlib.closing(listening):
        if not settings.serve_controllers:
            refuse_sqlite(settings, "HOLDFAST_SERVE_CONTROLLERS=false leaves background work to other processes")
        context = open_service(settings)
        background = Background(context, loops_of(settings), "serve", controllers=settings.serve_controllers)
        server = uvicorn.Server(http_config(create_app(context), settings))
        # uvicorn drains and then raises the signal once more, for its caller: a service that was asked to end and
        # did so has not failed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        try:
            background.start()
            on_ready(context, _url(listening))
            server.run(sockets=[listening])
        finally:
            background.stop(timeout_seconds=settings.shutdown_seconds)
            close_service(context)


def http_config(app: ASGIApp, settings: ServiceSettings) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=bounded_connections(settings.header_seconds, settings.most_connections),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips=settings.trusted_proxies,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )


def _listen(host: str, port: int) -> socket.socket:
    """Before the catalog is touched: a second service on this port must not migrate or write anything."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise PortInUseError(
            f"HOLDFAST_HOST: {host} is not an address of this machine. Use 127.0.0.1, or 0.0.0.0 for all of them."
        ) from None
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise PortInUseError(
            f"HOLDFAST_PORT: {host}:{port} cannot be listened on ({error.strerror}). Stop the program that uses it, or "
            "give another port with --port."
        ) from None
    return listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
