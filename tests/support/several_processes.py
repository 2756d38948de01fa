"""`holdfast serve --workers 2` on a Postgres: its processes, and which of them are there."""

from __future__ import annotations

import secrets
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil
from sqlalchemy import text

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_VERSION
from holdfast_service.db.engine import Database
from tests.support.serve import ServedHoldfast, holdfast_serve

_WORKERS = 2


@dataclass
class ServedBySeveral:
    service: ServedHoldfast
    database: Database
    token: str

    authority: Path | None = None

    def http(self) -> httpx.Client:
        """A connection of its own for each request: any process may answer it."""
        headers = {
            "Authorization": f"Bearer {self.token}",
            PROTOCOL_HEADER: PROTOCOL_VERSION,
            "Connection": "close",
        }
        verify = True if self.authority is None else ssl.create_default_context(cafile=self.authority)
        return httpx.Client(base_url=self.service.url, headers=headers, timeout=60, verify=verify)

    def alive(self, kind: str) -> set[int]:
        """The pids that have said so in the catalog, and are there."""
        with self.database.read() as session:
            said = session.scalars(
                text("SELECT pid FROM workers WHERE kind = :kind AND ended_at IS NULL"), {"kind": kind}
            ).all()
        return {pid for pid in said if psutil.pid_exists(pid)}

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self.service.process.runs, self.service.process.log_text[-4000:]
            threading.Event().wait(0.05)

    def until_complete(self) -> None:
        self.until(lambda: (len(self.alive("serve")), len(self.alive("worker"))) == (_WORKERS, 1))


@contextmanager
def served_by_several(
    folder: Path,
    database_url: str,
    *,
    other_settings: Mapping[str, str] = MappingProxyType({}),
    authority: Path | None = None,
) -> Iterator[ServedBySeveral]:
    """All processes are there when the block begins. `authority`: as for holdfast_serve."""
    token = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
    settings = {
        "HOLDFAST_DATABASE_URL": database_url,
        "HOLDFAST_BOOTSTRAP_TOKEN": token,
        "HOLDFAST_SERVE_WORKERS": str(_WORKERS),
        "HOLDFAST_DATABASE_CONNECTIONS": "5",
        **other_settings,
    }
    database = Database(database_url)
    try:
        with holdfast_serve(folder, other_settings=settings, authority=authority, forked=False) as service:
            started = ServedBySeveral(service, database, token, authority)
            started.until_complete()
            yield started
    finally:
        database.dispose()
