"""The real PgBouncer for the tests, in transaction mode: each transaction gets another connection of Postgres."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import URL, make_url

from tests.support.debian import debian_program
from tests.support.ports import free_ports
from tests.support.postgres import unprivileged_user
from tests.support.processes import ServerProcess


class PgBouncer:
    """In front of one Postgres; `server_connections` for each database, at most."""

    def __init__(self, folder: Path, postgres_url: str, server_connections: int) -> None:
        self._folder = folder
        self._url = make_url(postgres_url)
        self._port = free_ports()
        self._user = unprivileged_user()  # PgBouncer refuses to run as root
        program = _program(folder)
        self._write_configuration(server_connections)
        if self._user:
            for each in (folder, *folder.iterdir()):
                shutil.chown(each, self._user, self._user)
        self._process = ServerProcess(
            [str(program), str(folder / "pgbouncer.ini")],
            log=folder / "pgbouncer.log",
            ready=self._answers,
            cwd=folder,
            env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
            user=self._user,
        )

    def url_for(self, postgres_url: str) -> str:
        """The same database through the pooler."""
        return self._through(make_url(postgres_url).database).render_as_string(hide_password=False)

    def stop(self) -> None:
        self._process.stop(grace_seconds=2)

    def _through(self, database: str | None) -> URL:
        return self._url.set(host="127.0.0.1", port=self._port, database=database)

    def _write_configuration(self, server_connections: int) -> None:
        user, password = self._url.username or "postgres", self._url.password or ""
        (self._folder / "users.txt").write_text(f'"{user}" "{password}"\n')
        (self._folder / "pgbouncer.ini").write_text(
            f"""[databases]
* = host={self._url.host or "127.0.0.1"} port={self._url.port or 5432}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self._port}
unix_socket_dir =
auth_type = trust
auth_file = {self._folder / "users.txt"}
admin_users = {user}
pool_mode = transaction
default_pool_size = {server_connections}
max_client_conn = 1000
"""
        )

    def _answers(self) -> bool:
        dsn = self._through("pgbouncer").set(drivername="postgresql").render_as_string(hide_password=False)
        try:
            with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as connection:
                connection.execute("SHOW VERSION")
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def pgbouncer(postgres_url: str, *, server_connections: int) -> Iterator[PgBouncer]:
    """In front of the server of this URL; gone afterwards. NotHereError where it cannot be had."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-pgbouncer-"))
    try:
        server = PgBouncer(folder, postgres_url, server_connections)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _program(folder: Path) -> Path:
    """PgBouncer; of an unpacked one a copy, because another user may not reach into this virtual environment."""
    program = debian_program("pgbouncer", "usr/sbin/pgbouncer")
    if not program.is_relative_to(sys.prefix):
        return program
    for each in (program, *program.parents[2].glob("usr/lib/*/*.so.*")):
        shutil.copy(each, folder / each.name)
    return folder / program.name
