"""`holdfast serve` as a process of its own, with the store and the catalog of one's choice.

For the end-to-end tests and the demo. Every server listens on loopback, keeps its data in a temporary folder and is
gone when its block ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import urllib3

from tests.support.databases import migrated_file
from tests.support.forked import run_forked
from tests.support.ports import free_ports
from tests.support.postgres import postgres_server
from tests.support.processes import ServerProcess
from tests.support.store_servers import SERVERS, StoreServer

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
"""The command, as it is installed beside this interpreter."""
ENTRY_POINT = "holdfast_client.cli.main:main"
"""The same for a ForkedProgram."""


@dataclass(frozen=True)
class ServedHoldfast:
    """`environment` is all that a trainer needs to find it."""

    url: str
    environment: dict[str, str]
    process: ServerProcess
    store: StoreServer | None = None


@contextmanager
def holdfast_serve(
    folder: Path,
    *,
    store: str = "posix",
    database: Literal["sqlite", "postgres"] = "sqlite",
    other_settings: Mapping[str, str] = MappingProxyType({}),
    authority: Path | None = None,
    forked: bool = True,
) -> Iterator[ServedHoldfast]:
    """A service that is ready, and the servers that it needs; `folder` must exist, `store` is one of STORES.

    `authority`: whose certificate it shows, if `other_settings` name one.

    `forked`: its process starts in a moment (tests/support/forked.py), on a catalog that is migrated already. Without
    it a user's command starts it, on nothing: for tests of its start, and for measurements.
    """
    data, port = folder / "data", free_ports()
    settings = {**other_settings, "HOLDFAST_DATA_DIR": str(data), "HOLDFAST_PORT": str(port)}
    client = {"HOLDFAST_URL": f"http://127.0.0.1:{port}", "HOLDFAST_DATA_DIR": str(data)}
    if authority is not None:
        client |= {"HOLDFAST_URL": f"https://127.0.0.1:{port}", "HOLDFAST_CA_FILE": str(authority)}
    server: StoreServer | None = None
    with ExitStack() as servers:
        if store != "posix":
            server = servers.enter_context(SERVERS[store]())
            settings |= {"HOLDFAST_STORE": server.store_url, **server.environment}
        if database == "postgres":
            postgres = servers.enter_context(postgres_server())
            name = f"holdfast_serve_{secrets.token_hex(6)}"
            settings["HOLDFAST_DATABASE_URL"] = postgres.create_database(name)
            servers.callback(postgres.drop_database, name)
            # On SQLite the service makes its first token by itself, and the client finds it in the data folder.
            token = f"hold_{secrets.token_hex(8)}_{secrets.token_hex(32)}"
            settings["HOLDFAST_BOOTSTRAP_TOKEN"] = client["HOLDFAST_TOKEN"] = token
        elif forked and "HOLDFAST_DATABASE_URL" not in other_settings and not (data / "catalog.db").exists():
            data.mkdir(mode=0o700, exist_ok=True)
            shutil.copy(migrated_file(), data / "catalog.db")
        process = ServerProcess(
            [ENTRY_POINT if forked else HOLDFAST, "serve"],
            log=folder / "service.log",
            ready=lambda: is_ready(client["HOLDFAST_URL"], authority),
            env=without_holdfast_settings() | settings,
            forked=forked,
        )
        servers.callback(process.stop)
        yield ServedHoldfast(client["HOLDFAST_URL"], client, process, server)


def run_holdfast(*arguments: str, typed: str | None = None, **settings: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, with these settings and no others. `typed`: what it reads from stdin."""
    return run_forked(ENTRY_POINT, arguments, environment=without_holdfast_settings() | settings, typed=typed)


@contextmanager
def request_without_its_body(url: str, token: str) -> Iterator[tuple[socket.socket, bytes]]:
    """A connection with a request under way: the service waits for these bytes, and then answers 201."""
    body = b'{"name": "made while it ends", "scopes": ["read"]}'
    head = (
        f"POST /v1/tokens HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nExpect: 100-continue\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.settimeout(60)
        connection.sendall(head.encode())
        assert b"100 Continue" in connection.recv(4096)
        yield connection, body


def without_holdfast_settings() -> dict[str, str]:
    """This process's environment, less the settings of whatever service its user works with. No cloud is asked for
    notices, wherever the tests run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return kept | {"HOLDFAST_PREEMPTION_CLOUD": "none"}


def is_ready(url: str, authority: Path | None = None) -> bool:
    try:
        with urllib3.PoolManager(ca_certs=None if authority is None else str(authority)) as http:
            return http.request("GET", f"{url}/readyz", timeout=2, retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False
