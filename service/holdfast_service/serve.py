"""`holdfast serve`: the application behind uvicorn, until SIGTERM or SIGINT.

One process serves and does the background work beside it. With `--workers N` on Postgres, N processes serve one
listening socket, and one more does the background work. uvicorn's supervisor starts them, starts again what ends or
hangs, and passes SIGTERM on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import structlog
import uvicorn
from fastapi import FastAPI
from prometheus_client.multiprocess import mark_process_dead
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from holdfast_service.app import create_app
from holdfast_service.background.registry import Background, loops_of
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.logging import configure_logging
from holdfast_service.secrets.keyring import key_settings
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings, SettingsError
from holdfast_service.stores.base import StoreError
from holdfast_service.web.certificate import ServedCertificate, certificate_of
from holdfast_service.web.connections import ServingLoop, TrustedProxies, bounded_connections
from holdfast_service.web.fair_queue import WrongTokens
from holdfast_service.web.frame import SHARED_COUNTERS
from holdfast_service.worker import refuse_sqlite, work

_log = structlog.get_logger("holdfast.serve")

# Longer than a trainer pauses between two calls, so that its connections are not closed under it.
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 2048
_ENDS_WITHIN_SECONDS = 0.5
_OTHER_OPEN_FILES = 800
"""For the database, the store, files on their way through the service, and connections that are let in before
those that make room for them have closed."""
# A process that starts on a busy machine answers its supervisor only when everything is imported. While the supervisor
# waits for that answer it hears no signal.
_HANGS_AFTER_SECONDS = 60
_BEGUN_AGAIN_AFTER_SECONDS = 5
_SWITCH_SECONDS = 0.001
_COLLECTED_AFTER = 10_000
"""So many objects more, and Python looks for cycles among them."""
_BACKGROUND_NICE = 5


class PortInUseError(RuntimeError):
    """The address cannot be listened on."""


def serve(settings: ServiceSettings, on_ready: Callable[[ServiceContext, str], None]) -> None:
    """Returns after the requests in flight have ended. `on_ready` is told where it listens, before the first request.

    Raises PortInUseError, SettingsError and ProblemError(`database_unavailable`).
    """
    TrustedProxies.of(settings)
    _allow_connections(settings.most_connections)
    certificate = certificate_of(settings)
    if certificate is not None:
        certificate.context()  # what is wrong with its files is said before anything is touched
    warn_of_plain_sessions(settings)
    warn_of_plain_secrets(settings)
    with _listening(settings) as listening:
        if not settings.serve_controllers:
            refuse_sqlite(settings, "HOLDFAST_SERVE_CONTROLLERS=false leaves background work to other processes")
        if settings.serve_workers == 1:
            _serve_here(settings, listening, certificate, on_ready)
        else:
            refuse_sqlite(settings, f"`holdfast serve --workers {settings.serve_workers}` is several processes")
            _serve_in_processes(settings, listening, certificate, on_ready)


def warn_of_plain_sessions(settings: ServiceSettings) -> None:
    """Whether a proxy ends TLS in front the service sees only when a call comes, and then by the proxy's word."""
    by_tls = settings.tls_certificate is not None
    if by_tls or settings.on_loopback or (settings.public_url or "").startswith("https:"):
        return
    _log.warning(
        "sessions_may_go_over_plain_http",
        reason="HOLDFAST_PUBLIC_URL names no https address. The cookie of a session of the web page is kept to https "
        "only if a proxy of HOLDFAST_TRUSTED_PROXIES says so by X-Forwarded-Proto. Set HOLDFAST_PUBLIC_URL to the "
        "address of the page (https://…).",
    )


def warn_of_plain_secrets(settings: ServiceSettings) -> None:
    """A service for others has backups, and people who see its database."""
    if settings.embedded or key_settings(settings):
        return
    _log.warning(
        "secrets_are_not_encrypted",
        reason="The catalog has the signing key and the secrets of webhooks in clear, and so has each backup of it. "
        "Name a key: HOLDFAST_SECRETS_KEY_FILE.",
    )


def _allow_connections(count: int) -> None:
    """As many open files as that needs, as far as this process may; those that it starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = connections_within(count, soft)
    if most < count:
        _log.warning(
            "fewer_connections",
            most=most,
            reason=f"HOLDFAST_MOST_CONNECTIONS={count} takes {wanted} open files, and this process may have {soft} "
            "(`ulimit -Hn`).",
        )


def connections_within(wanted: int, files: int) -> int:
    """How many at a time, with so many open files (the kernel's limit)."""
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files - _OTHER_OPEN_FILES))


def http_config(
    app: ASGIApp | Callable[[], ASGIApp],
    settings: ServiceSettings,
    certificate: ServedCertificate | None = None,
    **more: Any,
) -> uvicorn.Config:
    """How uvicorn serves the application, or what `app` makes with `factory=True`. `certificate`: by TLS."""
    return _Config(app, settings, certificate, more)


class _Config(uvicorn.Config):
    """Can be sent to another process, which loads it there."""

    def __init__(
        self,
        app: ASGIApp | Callable[[], ASGIApp],
        settings: ServiceSettings,
        certificate: ServedCertificate | None,
        more: dict[str, Any],
    ) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = connections_within(settings.most_connections, soft)
        self._bounds = (settings.header_seconds, most, TrustedProxies.of(settings))
        self._wrong_tokens = WrongTokens()
        self._certificate = certificate
        super().__init__(
            app,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # web/connections.py; uvicorn would believe every program on this machine
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=settings.shutdown_seconds,
            **more,
        )

    def load(self) -> None:
        tls = None if self._certificate is None else self._certificate.context
        self.http = cast("type[asyncio.Protocol]", bounded_connections(*self._bounds, self._wrong_tokens, tls))
        super().load()

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        """uvloop would take neither a socket with a door nor TLS as it is here."""
        return partial(ServingLoop, self._wrong_tokens, by_tls=self._certificate is not None)


class _Server(uvicorn.Server):
    """uvicorn's asks ten times a second whether it is to end, which is most of what an idle service does."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(_ENDS_WITHIN_SECONDS)


def _serve_here(
    settings: ServiceSettings,
    listening: socket.socket,
    certificate: ServedCertificate | None,
    on_ready: Callable[[ServiceContext, str], None],
) -> None:
    context = open_service(settings)
    background = Background(context, loops_of(settings), "serve", controllers=settings.serve_controllers)
    server = _Server(http_config(create_app(context, certificate=certificate), settings, certificate))
    answer_evenly()
    # uvicorn's own, already now: told before it runs, it ends at once. It drains and then raises the signal once more,
    # for its caller: a service that was asked to end and did so has not failed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    try:
        background.start()
        on_ready(context, _url(listening, certificate))
        server.run(sockets=[listening])
    finally:
        background.stop(timeout_seconds=settings.shutdown_seconds)
        close_service(context)


def _serve_in_processes(
    settings: ServiceSettings,
    listening: socket.socket,
    certificate: ServedCertificate | None,
    on_ready: Callable[[ServiceContext, str], None],
) -> None:
    # Migrations and wrong settings are this process's own; afterwards it has no connection and only supervises.
    context = open_service(settings)
    try:
        on_ready(context, _url(listening, certificate))
    finally:
        close_service(context)
    config = http_config(
        partial(_application_of_process, settings, certificate),  # each process gets one, for both
        settings,
        certificate,
        factory=True,
        workers=settings.serve_workers,
        timeout_worker_healthcheck=_HANGS_AFTER_SECONDS,
    )
    with TemporaryDirectory(prefix="holdfast-counters-") as counters:
        os.environ[SHARED_COUNTERS] = counters  # before the processes start: they count into files of this folder
        _Supervisor(config, listening, settings).run()


class _Supervisor(Multiprocess):
    """uvicorn's, with one more process: for the background work, unless it is left to `holdfast workers run`."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, settings: ServiceSettings) -> None:
        super().__init__(config, [listening])
        self._settings = settings
        self._background = self._new_background()

    def init_processes(self) -> None:
        super().init_processes()
        if self._settings.serve_controllers:
            self._background.start()

    def keep_subprocess_alive(self) -> None:
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for gone in before - {process.pid for process in self.processes}:
            # What it said last of the calls that wait there would be told for ever.
            mark_process_dead(gone)  # type: ignore[no-untyped-call]
        if self.should_exit.is_set() or not self._settings.serve_controllers or self._background.is_alive():
            return
        _log.warning("background_process_ended", pid=self._background.pid, exit_code=self._background.exitcode)
        self._background = self._new_background()
        self._background.start()

    def terminate_all(self) -> None:
        super().terminate_all()
        if self._settings.serve_controllers:
            self._background.terminate()

    def join_all(self) -> None:
        super().join_all()
        if self._settings.serve_controllers:
            self._background.join()

    def _new_background(self) -> multiprocessing.process.BaseProcess:
        # A fresh interpreter, as uvicorn's own: a fork would share locks, connections and random numbers.
        return multiprocessing.get_context("spawn").Process(target=_work_in_process, args=(self._settings,))


def _application_of_process(settings: ServiceSettings, certificate: ServedCertificate | None) -> FastAPI:
    """Called in each process that serves."""
    with _a_process_of_several(settings):
        if certificate is not None:
            certificate.context()
        context = open_service(settings)
        background = Background(context, loops_of(settings), "serve", controllers=False)
        background.start()

    @contextlib.asynccontextmanager
    async def until_drained(_: FastAPI) -> AsyncIterator[None]:
        yield
        background.stop(timeout_seconds=settings.shutdown_seconds)
        close_service(context)

    application = create_app(context, lifespan=until_drained, certificate=certificate)
    answer_evenly()
    return application


def answer_evenly() -> None:
    """Once all is loaded, in each process that answers calls: what one call does holds up another one less.

    A thread that the database has answered waits for the interpreter behind each thread that computes, for 5 ms by
    Python's default. A shorter time costs threads that only compute some percent. And what is loaded is never garbage:
    to look at its 240,000 objects again and again stops every call for a tenth of a second.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)


def _work_in_process(settings: ServiceSettings) -> None:
    os.nice(_BACKGROUND_NICE)  # those who answer calls come first, where they share cores
    with _a_process_of_several(settings):
        work(settings, lambda context: _log.info("background_process_started", process_id=context.process_id))


@contextlib.contextmanager
def _a_process_of_several(settings: ServiceSettings) -> Iterator[None]:
    """What begins in the block says why it cannot, and ends a little later. The supervisor starts it again: the others
    go on meanwhile."""
    configure_logging(settings)
    threading.Thread(target=_end_with_parent, name="holdfast-parent", daemon=True).start()
    try:
        yield
    except (ProblemError, SettingsError, StoreError) as error:
        _log.error("process_cannot_start", reason=str(error))
        time.sleep(_BEGUN_AGAIN_AFTER_SECONDS)
        # At once: a supervisor that asks a process which is just ending waits for an answer that never comes.
        os._exit(1)


def _end_with_parent() -> None:
    """A supervisor that was killed leaves no process on its port."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _listening(settings: ServiceSettings) -> Iterator[socket.socket]:
    """Raises PortInUseError."""
    path = settings.socket
    with contextlib.closing(_listen(settings.host, settings.port) if path is None else _listen_at(path)) as listening:
        made = None if path is None else os.stat(path)
        try:
            yield listening
        finally:
            with contextlib.suppress(OSError):  # a successor may have made its own there meanwhile
                if path is not None and made is not None and os.path.samestat(made, os.stat(path)):
                    path.unlink()


def _listen_at(path: Path) -> socket.socket:
    """What a killed service left there is in nobody's way."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o117)
    try:
        if path.is_socket() and listening.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
            listening.close()
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise PortInUseError(
            f"HOLDFAST_SOCKET: {path} cannot be listened on ({error.strerror or error}). Stop the program that uses "
            "it, or name another path in a folder that the service's user can write to."
        ) from None
    finally:
        os.umask(mask)
    return listening


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


def _url(listening: socket.socket, certificate: ServedCertificate | None) -> str:
    scheme = "http" if certificate is None else "https"
    if listening.family == socket.AF_UNIX:
        return f"{scheme}+unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
