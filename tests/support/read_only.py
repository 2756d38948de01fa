"""A catalog that answers every question and takes no write: a standby that was not promoted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from holdfast_service.db.engine import Database


@contextmanager
def read_only(database: Database) -> Iterator[None]:
    """For all connections that `database` makes until the end of the block."""

    def refuse_writes(connection: Any, *_: Any) -> None:
        if database.is_postgres:
            connection.execute("SELECT set_config('default_transaction_read_only', 'on', false)")
            connection.commit()
        else:
            connection.execute("PRAGMA query_only=ON")

    event.listen(database.engine, "connect", refuse_writes)
    database.engine.dispose()
    try:
        yield
    finally:
        event.remove(database.engine, "connect", refuse_writes)
        database.engine.dispose()
