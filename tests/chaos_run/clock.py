"""The wall clock of a process jumps: what a person, a broken NTP server or a resumed virtual machine does to it.

`follow_clock()` in a Python process makes `time.time()` and `datetime.now()`, as Holdfast, logging and the standard
library's users of them see it, follow the seconds that stand in the file $CHAOS_CLOCK. A database's clock is its own:
`DatabaseClock` puts a `clock_timestamp()` of this database before the built-in one. Monotonic clocks do not jump, as on
any machine.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import psycopg

VARIABLE = "CHAOS_CLOCK"


def set_clock(path: Path, seconds: float) -> None:
    """Every process that follows this file is so far ahead from now on; below 0 it is behind."""
    fresh = path.with_suffix(".new")
    fresh.write_text(repr(seconds))
    fresh.replace(path)


def follow_clock() -> None:
    """Call it when all modules of Holdfast are imported. Without $CHAOS_CLOCK it does nothing."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    true_time, true_datetime = time.time, datetime

    def ahead() -> float:
        try:
            with open(path, encoding="ascii") as file:
                return float(file.read())
        except FileNotFoundError:
            return 0.0

    class Jumping(true_datetime):
        """Only asked for the time: what it gives back is a plain `datetime`."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return true_datetime.now(tz) + timedelta(seconds=ahead())

    time.time = lambda: true_time() + ahead()
    for name, module in list(sys.modules.items()):
        if name.startswith("holdfast") and getattr(module, "datetime", None) is true_datetime:
            module.datetime = Jumping


class DatabaseClock:
    """Of one Postgres database. `install` before the service connects to it."""

    def __init__(self, url: str) -> None:
        self._url = url.replace("postgresql+psycopg://", "postgresql://")

    def install(self) -> None:
        with self._connect() as connection:
            name = connection.info.dbname
            connection.execute("CREATE SCHEMA chaos")
            connection.execute("CREATE TABLE chaos.clock (ahead interval NOT NULL)")
            connection.execute("INSERT INTO chaos.clock VALUES ('0')")
            connection.execute(
                "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE "
                "AS 'SELECT pg_catalog.clock_timestamp() + ahead FROM chaos.clock'"
            )
            # Named, the built-in schema is searched in its turn and no longer first.
            connection.execute(f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')

    def set(self, seconds: float) -> None:
        with self._connect() as connection:
            connection.execute("UPDATE chaos.clock SET ahead = make_interval(secs => %s)", [seconds])

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self._url, autocommit=True, connect_timeout=10)
