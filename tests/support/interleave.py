"""Interleavings that a test decides: one side is held at a gate inside its transaction until the other has come.

No sleep decides a result here. What is polled is only whether the other side waits for a lock of the database.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any, TypeVar

import pytest
from sqlalchemy import event, text

from holdfast_service.db.engine import Database
from tests.support.rank import Refused
from tests.support.service import RunningService

_WAIT_SECONDS = 120
# SQLite does not tell who waits. Whoever is held in a write for so long lets nobody else write.
_SQLITE_MOMENT_SECONDS = 0.3

First = TypeVar("First")
Second = TypeVar("Second")


def refused(code: str) -> pytest.RaisesExc[Refused]:
    """`with refused("stale_attempt"):` the block is refused with this problem code."""
    return pytest.RaisesExc(Refused, check=lambda error: error.code == code)


class Gate:
    """Holds who passes it until it is opened. Only the first passer is held."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            first = not self._reached.is_set()
            self._reached.set()
        if first and not self._opened.wait(_WAIT_SECONDS):
            raise AssertionError("nobody opened the gate")

    def wait_until_reached(self) -> None:
        if not self._reached.wait(_WAIT_SECONDS):
            raise AssertionError("nobody came to the gate")

    def open(self) -> None:
        self._opened.set()


def hold_after(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Gate:
    """The first call of `module.name` is held just after it has done its work."""
    return _hold(monkeypatch, module, name, before=False)


def hold_before(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Gate:
    """The first call of `module.name` is held just before it."""
    return _hold(monkeypatch, module, name, before=True)


def _hold(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, *, before: bool) -> Gate:
    gate = Gate()
    real: Callable[..., Any] = getattr(module, name)

    def held(*args: Any, **kwargs: Any) -> Any:
        if before:
            gate.hold()
            return real(*args, **kwargs)
        result = real(*args, **kwargs)
        gate.hold()
        return result

    monkeypatch.setattr(module, name, held)
    return gate


@contextmanager
def in_background(*gates: Gate) -> Iterator[ThreadPoolExecutor]:
    """Threads for the sides; the gates are opened at the end, whatever happened, so that none is left behind."""
    with ThreadPoolExecutor(16) as threads:
        try:
            yield threads
        finally:
            for gate in gates:
                gate.open()


def overlap(
    service: RunningService, gate: Gate, first: Callable[[], First], second: Callable[[], Second]
) -> tuple[Future[First], Future[Second]]:
    """`second` comes while `first` is held at the gate: it waits for a lock or ends, then the gate opens. Both are over
    when this returns."""
    with in_background(gate) as threads:
        one = threads.submit(first)
        gate.wait_until_reached()
        other = threads.submit(second)
        until_blocked_or_done(service, other)
        gate.open()
    return one, other


@contextmanager
def just_before(service: RunningService, statement: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Runs `act` once, in the middle of another's transaction: just before its first statement that matches. What it
    gives is that statement, once it was seen."""
    seen: list[str] = []

    def listen(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        if not seen and re.search(statement, text, re.DOTALL):
            seen.append(text)
            act()

    event.listen(service.context.database.engine, "before_cursor_execute", listen)
    try:
        yield seen
    finally:
        event.remove(service.context.database.engine, "before_cursor_execute", listen)


def until_blocked_or_done(service: RunningService, future: Future[Any]) -> None:
    """Returns when somebody waits for a lock of this database, or the future is done without having waited."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not future.done():
        if not service.context.database.is_postgres:
            if _is_held_in_a_write(service.context.database):
                return
            wait([future], _SQLITE_MOMENT_SECONDS)
            continue
        with service.context.database.read() as session:
            waiting = session.scalar(
                text(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
                )
            )
        if waiting:
            return
        if time.monotonic() > deadline:
            raise AssertionError("it neither waits for a lock nor ends")
        time.sleep(0.01)


def _is_held_in_a_write(database: Database) -> bool:
    """Of a SQLite catalog: its one write lock does not become free for a moment."""
    path = str(database.url.database)
    with closing(sqlite3.connect(path, timeout=_SQLITE_MOMENT_SECONDS, isolation_level=None)) as another:
        try:
            another.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        another.execute("ROLLBACK")
    return False
