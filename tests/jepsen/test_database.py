"""A copy that the trial fails over to knows what it is said to know: else the judge calls a commit lost that nobody
could have kept."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.jepsen.database import Copy, FailoverPostgres, failover_postgres

_HELD_SECONDS = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[FailoverPostgres]:
    with failover_postgres() as server:
        yield server


@pytest.mark.parametrize("take", [FailoverPostgres.older_copy, FailoverPostgres.standby])
def test_everything_that_was_committed_until_then_is_in_the_copy(
    server: FailoverPostgres, take: Callable[[FailoverPostgres], Copy]
) -> None:
    table = f"rows_{secrets.token_hex(4)}"
    with server.server.connect() as connection:
        connection.execute(f"CREATE TABLE {table} (id integer)")
    committed: list[float] = []
    over = threading.Event()

    def commit() -> None:
        with server.server.connect() as connection:
            while not over.is_set():
                connection.execute(f"INSERT INTO {table} VALUES (%s)", [len(committed)])
                committed.append(time.monotonic())

    writer = threading.Thread(target=commit)
    writer.start()
    try:
        while not committed:
            time.sleep(0.01)
        copy = take(server)
        _let_it_lag(copy)
        server.cut_off(copy)
        by_then = len(committed)
        while len(committed) == by_then:
            time.sleep(0.01)
    finally:
        over.set()
        writer.join()
    server.fail_over(copy)
    with server.server.connect() as connection:
        there = {row[0] for row in connection.execute(f"SELECT id FROM {table}")}
    told = {number for number, at in enumerate(committed) if at < copy.knows_until}
    assert told, "something was committed before"
    assert told <= there
    assert len(there) < len(committed), "and something is lost"


def _let_it_lag(copy: Copy) -> None:
    """A standby that gets nothing for a while, as on a busy machine."""
    if copy.standby is None:
        return
    standby = psutil.Process(copy.standby.pid)
    while not (receivers := list(filter(_receives, standby.children()))):
        time.sleep(0.01)  # it answers before it has begun to follow
    (receiver,) = receivers
    receiver.suspend()
    threading.Timer(_HELD_SECONDS, receiver.resume).start()
    time.sleep(_HELD_SECONDS / 2)


def _receives(process: psutil.Process) -> bool:
    try:
        return "walreceiver" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has ended since it was listed, as the process of a closed connection does
        return False
