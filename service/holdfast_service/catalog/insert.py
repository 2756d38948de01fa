"""Inserting what may be there already, in one statement that waits for a concurrent insert instead of failing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from holdfast_service.catalog.tables import Table


def insert_absent(session: Session, table: type[Table], rows: Sequence[dict[str, Any]]) -> None:
    """`INSERT … ON CONFLICT DO NOTHING`, in the order given.

    Whoever inserts rows that others may insert too gives them sorted, or two batches deadlock (protocol rule 16).
    What is there afterwards must be read in a LATER statement: this one's snapshot is older than the other's commit.
    """
    if not rows:
        return
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    session.flush()  # the connection does not: what was added before may be what these rows refer to
    # The rows as parameters: a statement that holds them is compiled anew each time, which costs more than to run it.
    session.connection().execute(dialect.insert(table).on_conflict_do_nothing(), list(rows))
