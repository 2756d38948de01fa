"""What a revision does to a big table while services save: nothing that reads or writes all of its rows under a lock.

A column that may be null, or has a constant default, is added in a moment. Its values a controller fills in, in
batches. An index is made concurrently, here. See docs/adr/0076.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import context, op


def create_index(
    name: str, table: str, columns: Sequence[str], *, where: str | None = None, unique: bool = False
) -> None:
    """An index of a table that saves write to. It is the only thing that its revision does: outside a transaction
    nothing is taken back, and a revision that was cut off runs again from its beginning."""
    condition = None if where is None else sa.text(where)
    options: dict[str, Any] = {"unique": unique, "sqlite_where": condition, "postgresql_where": condition}
    if not context.config.attributes.get("online"):
        op.create_index(name, table, list(columns), **options)
        return
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")  # what was cut off is there, and is no index
        op.create_index(name, table, list(columns), postgresql_concurrently=True, **options)


def drop_index(name: str, table: str) -> None:
    """Likewise."""
    if not context.config.attributes.get("online"):
        op.drop_index(name, table)
        return
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
