"""A Postgres that fails over: to an older copy of itself, or to a standby that was promoted and had not heard of the
last commits, as an asynchronous one has not. Everybody finds it at the same address, as behind a floating one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import psycopg

from tests.support.ports import free_ports
from tests.support.postgres import OwnPostgresServer, postgres_server
from tests.support.processes import ServerProcess

_PROMOTED_SECONDS = 60
_FOLLOWS_SECONDS = 60


@dataclass
class Copy:
    """`standby`: it runs and follows; `knows_until`: everything that was committed earlier is in it, and what was
    committed some time later is not (once it was cut off)."""

    name: str
    knows_until: float
    standby: ServerProcess | None = None
    port: int = 0


class FailoverPostgres:
    """Around a server that is ours: copies of it, and the switch to one."""

    def __init__(self, server: OwnPostgresServer) -> None:
        self.server = server
        self._copies = 0
        self._before = server.data

    def older_copy(self) -> Copy:
        """As it is now, and never newer. It has what was committed before it was begun; of what was committed while it
        was made nobody knows."""
        before = time.monotonic()
        return Copy(self._base_backup(), before)

    def standby(self) -> Copy:
        """Follows until `cut_off`."""
        name, port = self._base_backup("-R"), free_ports()
        return Copy(name, float("inf"), self.server.start_other(name, port), port)

    def cut_off(self, copy: Copy) -> None:
        """Of a standby: what is committed from now on does not reach it. What was committed before has: on a busy
        machine it is seconds behind."""
        if copy.standby is None:
            return
        copy.knows_until = time.monotonic()
        with self.server.connect() as connection:
            written = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        with self._connect(copy.port) as connection:
            _until(lambda: self._has_received(connection, written), "does not follow")
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
            _until(lambda: self._receives_nothing(connection), "goes on following")

    def fail_over(self, copy: Copy) -> None:
        """The server is killed, and the copy answers in its place."""
        self._before = self.server.data
        self.server.kill9()
        if copy.standby is not None:
            with self._connect(copy.port) as connection:
                connection.execute("SELECT pg_promote(true, %s)", [_PROMOTED_SECONDS])
                connection.execute("ALTER SYSTEM RESET primary_conninfo")
                connection.execute("CHECKPOINT")
            copy.standby.stop()
        self.server.use_data(copy.name)
        self.server.restart()

    def fail_back(self) -> None:
        """To the server of before the last failover, which has everything that was acknowledged until then."""
        self.server.kill9()
        self.server.use_data(self._before)
        self.server.restart()

    def pause(self) -> None:
        self._signal("suspend")

    def go_on(self) -> None:
        self._signal("resume")

    def terminate_backends(self, database: str, share: float) -> int:
        """So many of the services' connections end, in the middle of whatever they do."""
        with self.server.connect() as connection:
            ended = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = %s AND application_name = 'holdfast' AND random() < %s",
                [database, share],
            )
            return len(ended.fetchall())

    def _base_backup(self, *options: str) -> str:
        self._copies += 1
        name = f"copy{self._copies}"
        self.server.base_backup(name, *options)
        return name

    def _signal(self, what: str) -> None:
        """To the postmaster and its children, which are in sessions of their own."""
        try:
            postmaster = psutil.Process(self.server.pid)
            everybody = [postmaster, *postmaster.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in everybody:
            try:
                getattr(process, what)()
            except psutil.NoSuchProcess:
                continue

    @staticmethod
    def _has_received(standby: psycopg.Connection[tuple[object, ...]], written: tuple[object, ...] | None) -> bool:
        assert written is not None
        found = standby.execute("SELECT pg_last_wal_receive_lsn() >= %s::pg_lsn", written).fetchone()
        return found == (True,)

    @staticmethod
    def _receives_nothing(standby: psycopg.Connection[tuple[object, ...]]) -> bool:
        return standby.execute("SELECT count(*) FROM pg_stat_wal_receiver").fetchone() == (0,)

    @contextmanager
    def _connect(self, port: int) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        with self.server.connect(port) as connection:
            yield connection


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _FOLLOWS_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the standby {what} for {_FOLLOWS_SECONDS} s")
        time.sleep(0.05)


@contextmanager
def failover_postgres() -> Iterator[FailoverPostgres]:
    with postgres_server(own=True) as server:
        assert isinstance(server, OwnPostgresServer)
        yield FailoverPostgres(server)
