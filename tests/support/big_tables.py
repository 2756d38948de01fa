"""What a migration does to tables that can be big: watches its transactions on Postgres, and says which of them read or
write rows all over such a table, or leave a table written anew. Whoever saves would wait for that."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, event, text

from holdfast_service.db.engine import Database

SMALL = {
    "alembic_version",
    "catalog_identity",
    "controllers",
    "dashboard_grants",
    "event_numbering",
    "projects",
    "sign_ins",
    "store_maintenance",
    "stores",
    "tally_comparisons",
    "tokens",
    "webhooks",
    "workers",
}
"""Any other table counts as big: a new one too, until it is named here."""

_COUNTS = text("""
SELECT relname AS name, seq_scan + n_tup_ins + n_tup_upd + n_tup_del AS work, pg_relation_filenode(relid) AS file
FROM pg_stat_xact_user_tables WHERE schemaname = current_schema()
""")
_TAKES_AWAY = re.compile(r"\b(DROP COLUMN|DROP TABLE|RENAME|ALTER COLUMN \S+ (TYPE|SET NOT NULL))\b", re.IGNORECASE)
_ADDED = re.compile(r"\bADD COLUMN .*\bNOT NULL\b", re.IGNORECASE)
_OUTSIDE = re.compile(r"(CREATE (UNIQUE )?INDEX CONCURRENTLY|DROP INDEX CONCURRENTLY|ALTER TABLE \w+ VALIDATE) ")


@dataclass
class Watched:
    """By revision: what is wrong with it, and which statements take something from an older version."""

    wrong: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    takes_away: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    statements: list[str] = field(default_factory=list)


@contextmanager
def watched(database: Database) -> Iterator[Watched]:
    """Every transaction of the database's engine. One counts for the revision that it leaves the catalog at."""
    found = Watched()
    engine = database.engine

    def begin(connection: Connection) -> None:
        connection.info["before"] = _counts(connection)
        connection.info["asked"] = []

    def note(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if "pg_stat_xact" not in statement and "before" in connection.info:
            connection.info["asked"].append(statement)

    def commit(connection: Connection) -> None:
        before = connection.info.pop("before", None)
        if before is None:
            return
        asked = connection.info["asked"]
        if not asked:
            return  # it only kept a lock, while others worked
        found.statements += asked
        raw: Any = connection.connection.dbapi_connection
        revision = str(connection.exec_driver_sql("SELECT max(version_num) FROM alembic_version").scalar())
        if raw.autocommit:
            bad = [each for each in asked if re.match(r"(CREATE|ALTER|DROP|UPDATE)", each) and not _OUTSIDE.match(each)]
            found.wrong[revision].update(f"not in a transaction: {each}" for each in bad)
            return
        for name, (work, file) in _counts(connection).items():
            # A table that is new in this transaction has no rows yet.
            if name in SMALL or name not in before:
                continue
            if work > before[name][0]:
                found.wrong[revision].add(f"reads or writes all over {name}")
            if file != before[name][1]:
                found.wrong[revision].add(f"writes {name} anew")
        for each in asked:
            without_default = _ADDED.search(each) and "DEFAULT" not in each
            if re.match(r"\s*(ALTER|DROP) TABLE", each) and (_TAKES_AWAY.search(each) or without_default):
                found.takes_away[revision].add(each)

    hooks = {"begin": begin, "before_cursor_execute": note, "commit": commit}
    for name, hook in hooks.items():
        event.listen(engine, name, hook)
    try:
        yield found
    finally:
        for name, hook in hooks.items():
            event.remove(engine, name, hook)


def _counts(connection: Connection) -> dict[str, tuple[int, int]]:
    return {row.name: (row.work, row.file) for row in connection.execute(_COUNTS)}
