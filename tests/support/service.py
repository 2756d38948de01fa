"""A running service: the real application in the test's process.

`context` is the very object that its operations use, so that a test can look into the catalog and call an operation or
a controller's reconcile directly. `http` calls the application without a socket (tests/support/in_process.py). `url` is
for what needs one, a client or a command: a real uvicorn on loopback, started when a test first asks for it. Background
work does not run by itself here.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from sqlalchemy import select

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from holdfast_protocol.states import Scope
from holdfast_service.app import create_app
from holdfast_service.auth.principal import Principal, new_token_text, parse_token
from holdfast_service.auth.tokens import insert_token
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project
from holdfast_service.serve import http_config
from holdfast_service.service import close_service, open_service
from holdfast_service.settings import ServiceSettings
from holdfast_service.ui.endpoints import BUILT_INTO
from holdfast_service.web.certificate import certificate_of
from tests.support.in_process import InProcessTransport, in_process
from tests.support.ports import free_ports

ALL_SCOPES = tuple(Scope)


class RunningService:
    def __init__(self, context: ServiceContext, app: FastAPI, transport: InProcessTransport) -> None:
        self.context = context
        self.app = app
        self._transport = transport
        self._served = ExitStack()
        self._url: str | None = None
        self._starting = threading.Lock()
        self._all_scopes = self.token()

    @property
    def url(self) -> str:
        """Where a real server listens; it is started at the first call."""
        with self._starting:
            if self._url is None:
                self._url = self._served.enter_context(_uvicorn(self.app, self.context.settings))
            return self._url

    def token(
        self,
        *scopes: Scope,
        project: str | None = None,
        expires_in_seconds: float | None = None,
    ) -> str:
        """A new token: without scopes, all of them; `project` must exist (`make_project`)."""
        text = new_token_text()
        with self.context.database.transaction() as session:
            project_id = None
            if project is not None:
                project_id = session.execute(select(Project.id).where(Project.name == project)).scalar_one()
            expires_at: datetime | None = None
            if expires_in_seconds is not None:
                expires_at = database_now(session) + timedelta(seconds=expires_in_seconds)
            name = "test " + " ".join(scope.value for scope in scopes or ALL_SCOPES)
            insert_token(
                session, text, name=name, scopes=scopes or ALL_SCOPES, project_id=project_id, expires_at=expires_at
            )
        return text

    def caller(self, *scopes: Scope, project_id: str | None = None, project_name: str | None = None) -> Principal:
        """For calling an operation directly, without HTTP."""
        return Principal(
            token_id=parse_token(self._all_scopes)[0],
            name="test",
            scopes=frozenset(scopes or ALL_SCOPES),
            project_id=project_id,
            project_name=project_name,
        )

    def http(self, *, token: str | None = "", headers: Iterable[tuple[str, str]] = ()) -> httpx.Client:
        """A client that calls the application without a socket. The default token has all scopes; None sends none."""
        sent = {PROTOCOL_HEADER: PROTOCOL_VERSION, **dict(headers)}
        if token is not None:
            sent["Authorization"] = f"Bearer {token or self._all_scopes}"
        return httpx.Client(base_url="http://127.0.0.1", headers=sent, timeout=60, transport=self._transport)

    def make_project(self, name: str, *, quota_bytes: int | None = None) -> str:
        """Its id."""
        reply = self.http().put(f"/v1/projects/{name}", json={"quota_bytes": quota_bytes}, headers={"If-Match": "*"})
        reply.raise_for_status()
        return str(reply.json()["id"])

    def close(self) -> None:
        self._served.close()


@contextmanager
def running_service(settings: ServiceSettings, *, page_folder: Path = BUILT_INTO) -> Iterator[RunningService]:
    """`page_folder`: the files of the web page."""
    context = open_service(settings)
    try:
        app = create_app(context, page_folder=page_folder, certificate=certificate_of(settings))
        with in_process(app) as transport:
            running = RunningService(context, app, transport)
            try:
                yield running
            finally:
                running.close()
    finally:
        close_service(context)


@contextmanager
def _uvicorn(app: FastAPI, settings: ServiceSettings) -> Iterator[str]:
    """Its URL."""
    with socket.create_server(("127.0.0.1", free_ports())) as listening:
        yield from _serving(app, settings, listening)


def _serving(app: FastAPI, settings: ServiceSettings, listening: socket.socket) -> Iterator[str]:
    certificate = certificate_of(settings)
    config = http_config(app, settings, certificate)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="uvicorn", daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.005)
        if not thread.is_alive():
            raise RuntimeError("uvicorn did not start")
    try:
        yield f"http{'' if certificate is None else 's'}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
