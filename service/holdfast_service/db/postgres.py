"""How long the service waits for Postgres: no statement without an end, whatever became of the server.

Postgres itself ends a statement that takes too long (`statement_timeout`, which counts waiting for locks too), and a
transaction whose process has stopped (`idle_in_transaction_session_timeout`). A server that answers nothing at all ends
nothing, and TCP keeps a connection to a frozen one alive: the process gives an answer up by its own clock as well.

A pooler in transaction mode (PgBouncer) gives each transaction another connection of Postgres. A setting or a prepared
statement of a session then meets foreign transactions. So behind a pooler each transaction sets its own limits, and
nothing is prepared.
"""

from __future__ import annotations

import select
import time
from collections.abc import Generator
from contextlib import contextmanager
from math import inf
from typing import Any, Literal

import psycopg

_MARGIN_SECONDS = 2.0
"""Postgres is to be first: what it says of a slow statement tells more."""
_PING_SECONDS = 5.0
_TRUSTED_SECONDS = 1.0
"""So long after an answer a connection is used again without a ping, unless the server has said something since."""
_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout")

CONNECT_ARGUMENTS = {
    "connect_timeout": 5,
    "application_name": "holdfast",
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
}


class LimitedConnection(psycopg.Connection[Any]):
    """`answer_seconds`: after so long without an answer the connection is closed and the statement raises
    OperationalError. None: no end. `pooled`: a pooler stands between this process and Postgres."""

    answer_seconds: float | None = None
    pooled = False
    _answered_at = -inf

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **options: Any) -> Any:
        limited = gen if self.answer_seconds is None else _within(gen, self.answer_seconds)
        try:
            answer = super().wait(limited, *args, **options)
        except _NoAnswer as error:
            self.close()
            raise psycopg.OperationalError(str(error)) from None
        self._answered_at = time.monotonic()
        return answer

    def answered_just_now(self) -> bool:
        """And the server has not ended it since: what ends a connection sends a last word."""
        if time.monotonic() - self._answered_at > _TRUSTED_SECONDS:
            return False
        said = select.poll()
        said.register(self.fileno(), select.POLLIN)
        return not said.poll(0)

    @contextmanager
    def answering_within(self, seconds: float | None) -> Generator[None]:
        before, self.answer_seconds = self.answer_seconds, seconds
        try:
            yield
        finally:
            self.answer_seconds = before


class _NoAnswer(Exception):  # noqa: N818
    """Never leaves this module."""


def _within(gen: Generator[Any, Any, Any], seconds: float) -> Generator[Any, Any, Any]:
    """psycopg asks `gen` what to wait for, and sends it nothing each time that there was nothing for a while."""
    ends_at = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > ends_at:
                raise _NoAnswer(f"no answer within {seconds:g} seconds")
            wanted = gen.send(ready)
    except StopIteration as done:
        return done.value


def connect(statement_seconds: float, *arguments: Any, **options: Any) -> LimitedConnection:
    """A connection with these limits. Raises psycopg.OperationalError."""
    connection = LimitedConnection.connect(*arguments, **options)
    connection.answer_seconds = statement_seconds + _MARGIN_SECONDS
    try:
        connection.autocommit = True
        backend = connection.execute("SELECT pg_backend_pid()").fetchone()
        # A pooler makes up the number by which a client cancels a statement: the client has no backend of its own.
        connection.pooled = backend != (connection.info.backend_pid,)
        if connection.pooled:
            connection.prepare_threshold = None
        else:
            connection.execute(limits(statement_seconds, "false"))
        connection.autocommit = False
    except BaseException:
        connection.close()
        raise
    return connection


def limits(statement_seconds: float, local: Literal["true", "false"]) -> str:
    """The statement that sets both limits of Postgres: for the transaction, or for the session."""
    limit = f"{round(statement_seconds * 1000)}ms"
    return "SELECT " + ", ".join(f"set_config('{name}', '{limit}', {local})" for name in _LIMITS)


@contextmanager
def brief_ping(connection: LimitedConnection) -> Generator[None]:
    """While the block asks whether a connection that was idle still works, it waits shortly."""
    seconds = connection.answer_seconds
    with connection.answering_within(_PING_SECONDS if seconds is None else min(seconds, _PING_SECONDS)):
        yield


@contextmanager
def without_limits(connection: LimitedConnection) -> Generator[None]:
    """For what may take hours, within the transaction that is open: a migration of large tables."""
    connection.execute(limits(0, "true"))
    with connection.answering_within(None):
        yield
