"""The triggers that keep the sums of `db/tables/tallies.py`: whatever changes a row, by whichever statement, leaves the
difference in the same transaction. An append never waits for another transaction.

They are dropped before a migration and made after it, because SQLite alters a table by making it anew, and refuses to
rename one that a trigger of another table names. On Postgres they stay, because saves go on meanwhile: only what
differs is made anew (`settle_triggers`). So a change here needs a revision, even an empty one.

Copies change in three ways. What is new is counted as arriving. What is gone, has another size or another class moves
its own sums. And what may be kept for something else is marked: which of the four that is depends on other rows, and
the controller `tally` finds out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import Connection, inspect, text

_COMMITTED = "{row}.state = 'committed'"
_EVER = "{row}.committed_at IS NOT NULL"
_OF_CHECKPOINT = {
    "uploading": "CASE WHEN {row}.state = 'uploading' THEN 1 ELSE 0 END",
    "committed": f"CASE WHEN {_COMMITTED} THEN 1 ELSE 0 END",
    "logical_bytes": f"CASE WHEN {_COMMITTED} THEN {{row}}.logical_bytes ELSE 0 END",
    "deduplicated_bytes": f"CASE WHEN {_COMMITTED} THEN {{row}}.deduplicated_bytes ELSE 0 END",
    "ever_committed": f"CASE WHEN {_EVER} THEN 1 ELSE 0 END",
    "ever_aborted": "CASE WHEN {row}.aborted_at IS NOT NULL THEN 1 ELSE 0 END",
    "ever_chunk_bytes": f"CASE WHEN {_EVER} THEN {{row}}.chunk_bytes ELSE 0 END",
    "ever_uploaded_bytes": f"CASE WHEN {_EVER} THEN {{row}}.uploaded_bytes ELSE 0 END",
    "ever_deduplicated_bytes": f"CASE WHEN {_EVER} THEN {{row}}.deduplicated_bytes ELSE 0 END",
}
"""Column of `CheckpointSums` -> what a row of `checkpoints` adds to it."""

_BYTE_COLUMNS = "project_id, store_id, storage_class, counted, copies, bytes"
_BYTES_OF = "{row}.project_id, {row}.store_id, COALESCE({row}.storage_class, ''), {row}.counted"


def _checkpoint_delta(plus: str | None, minus: str | None) -> str:
    values = [
        f"{value.format(row=plus) if plus else 0} - {value.format(row=minus) if minus else 0}"
        for value in _OF_CHECKPOINT.values()
    ]
    return (
        f"INSERT INTO checkpoint_deltas (project_id, run_id, {', '.join(_OF_CHECKPOINT)}) "
        f"SELECT project_id, id, {', '.join(values)} FROM runs WHERE id = {plus or minus}.run_id;"
    )


def _byte_delta(sign: str, row: str) -> str:
    return (
        f"INSERT INTO byte_deltas ({_BYTE_COLUMNS}) SELECT {_BYTES_OF.format(row=row)}, {sign}1, "
        f"{sign}{row}.stored_bytes WHERE {row}.state <> 'gone';"
    )


def _list_delta(entries: str, row: str) -> str:
    return f"INSERT INTO list_deltas (project_id, entries) SELECT {row}.project_id, {entries};"


def _mark(column: str, value: str, due_at: str, when: str = "", *, keeps: str = "false") -> str:
    return f"INSERT INTO recount_marks ({column}, keeps, due_at) SELECT {value}, {keeps}, {due_at} {when};"


def _kind(row: str) -> str:
    """Copies of one kind are counted alike, if the same checkpoints need them."""
    return (
        f"(CASE WHEN {row}.state IN ('pending', 'copying') THEN 'arriving' "
        f"WHEN {row}.state IN ('deleting', 'cold', 'thawing', 'gone') THEN {row}.state ELSE 'there' END)"
    )


def _keeps_marks(checkpoint: str, end: str, now: str) -> str:
    """Of a pin or a hold: now, and when it is over by itself."""
    at_its_end = _mark("checkpoint_id", checkpoint, end, f"WHERE {end} > {now}", keeps="true")
    return f"{_mark('checkpoint_id', checkpoint, now, keeps='true')} {at_its_end}"


_SUMMED = "state, committed_at, aborted_at, logical_bytes, chunk_bytes, uploaded_bytes, deduplicated_bytes"
_MOVED = "OLD.stored_bytes <> NEW.stored_bytes OR COALESCE(OLD.storage_class, '') <> COALESCE(NEW.storage_class, '')"


def _row_triggers(now: str) -> list[tuple[str, str, str, str]]:
    """Name, when, under which condition, and what; in words that both databases have."""
    of_kind = f"{_kind('OLD')} <> {_kind('NEW')}"
    moved = _mark("checkpoint_id", "NEW.id", now)
    pin = _keeps_marks("NEW.id", "NEW.pinned_until", now)
    hold = _keeps_marks("NEW.checkpoint_id", "NEW.retain_until", now)
    return [
        ("checkpoint_added", "INSERT ON checkpoints", "", _checkpoint_delta("NEW", None)),
        ("checkpoint_changed", f"UPDATE OF {_SUMMED} ON checkpoints", "", _checkpoint_delta("NEW", "OLD")),
        ("checkpoint_removed", "DELETE ON checkpoints", "", _checkpoint_delta(None, "OLD")),
        (
            "checkpoint_found",
            "INSERT ON checkpoints",
            "NEW.state <> 'uploading'",
            moved,
        ),
        (
            "checkpoint_moved",
            "UPDATE OF state ON checkpoints",
            "OLD.state <> NEW.state",
            moved,
        ),
        ("pin_found", "INSERT ON checkpoints", "NEW.pinned_at IS NOT NULL", pin),
        ("pin_changed", "UPDATE OF pinned_at, pinned_until ON checkpoints", "", pin),
        ("hold_added", "INSERT ON holds", "", hold),
        ("hold_changed", "UPDATE OF released_at, retain_until ON holds", "", hold),
        ("hold_removed", "DELETE ON holds", "", _mark("checkpoint_id", "OLD.checkpoint_id", now, keeps="true")),
        # The collector forgets what a checkpoint had before anybody has taken up that it is over.
        (
            "list_dropped",
            "UPDATE OF chunk_list_id ON shards",
            "OLD.chunk_list_id IS NOT NULL AND NEW.chunk_list_id IS NULL",
            _mark(
                "chunk_id",
                "e.chunk_id",
                now,
                "FROM chunk_list_entries e WHERE e.chunk_list_id = OLD.chunk_list_id AND EXISTS "
                "(SELECT 1 FROM recount_marks m WHERE m.checkpoint_id = OLD.checkpoint_id)",
                keeps="true",
            ),
        ),
        (
            "copy_changed",
            "UPDATE OF state, stored_bytes, storage_class ON copies",
            f"(OLD.state = 'gone') <> (NEW.state = 'gone') OR {_MOVED}",
            _byte_delta("-", "OLD") + " " + _byte_delta("+", "NEW"),
        ),
        (
            "copy_needs_changed",
            "UPDATE OF state ON copies",
            f"NEW.state <> 'gone' AND {of_kind}",
            # What a copy was counted as before it was gone is old.
            _mark("chunk_id", "NEW.chunk_id", now, keeps="OLD.state = 'gone'"),
        ),
        ("copy_removed", "DELETE ON copies", "", _byte_delta("-", "OLD")),
        ("list_added", "INSERT ON chunk_lists", "NEW.entries > 0", _list_delta("NEW.entries", "NEW")),
        (
            "list_counted",
            "UPDATE OF entries ON chunk_lists",
            "",
            _list_delta("COALESCE(NEW.entries, 0) - COALESCE(OLD.entries, 0)", "NEW"),
        ),
        ("list_removed", "DELETE ON chunk_lists", "OLD.entries > 0", _list_delta("-OLD.entries", "OLD")),
    ]


def _arrivals(row: str) -> str:
    """Copies that are made whole: by a rebuild, or by something that brings them in."""
    return f"{row}.state NOT IN ('pending', 'copying', 'gone')"


_ONLY_TRASH_OR_NOTHING = "c.state <> 'gone' AND (c.counted & 3) IN (2, 3)"

_SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f000', 'now')"
_SQLITE = [
    *_row_triggers(_SQLITE_NOW),
    (
        "copy_added",
        "INSERT ON copies",
        "",
        _byte_delta("+", "NEW") + " " + _mark("chunk_id", "NEW.chunk_id", _SQLITE_NOW, f"WHERE {_arrivals('NEW')}"),
    ),
    (
        "reference_added",
        "INSERT ON shard_chunks",
        "",
        _mark(
            "chunk_id",
            "NEW.chunk_id",
            _SQLITE_NOW,
            f"WHERE EXISTS (SELECT 1 FROM copies c WHERE c.chunk_id = NEW.chunk_id AND {_ONLY_TRASH_OR_NOTHING})",
        ),
    ),
    ("reference_removed", "DELETE ON shard_chunks", "", _mark("chunk_id", "OLD.chunk_id", _SQLITE_NOW)),
]

_POSTGRES_NOW = "clock_timestamp()"
# Many rows in one statement: a save's chunks. `rows` are those that it has changed.
_POSTGRES_STATEMENTS = [
    (
        "copy_added",
        "INSERT ON copies",
        f"INSERT INTO byte_deltas ({_BYTE_COLUMNS}) SELECT {_BYTES_OF.format(row='r')}, count(*), "
        "sum(r.stored_bytes) FROM rows r WHERE r.state <> 'gone' GROUP BY 1, 2, 3, 4; "
        + _mark("chunk_id", "r.chunk_id", _POSTGRES_NOW, f"FROM rows r WHERE {_arrivals('r')}"),
    ),
    (
        "reference_added",
        "INSERT ON shard_chunks",
        # Behind the chunks' locks, which a recount that finds nobody in need of a chunk takes as well.
        _mark(
            "chunk_id",
            "r.chunk_id",
            _POSTGRES_NOW,
            "FROM rows r WHERE EXISTS (SELECT 1 FROM copies c WHERE c.chunk_id = r.chunk_id "
            f"AND {_ONLY_TRASH_OR_NOTHING})",
        ),
    ),
    (
        "reference_removed",
        "DELETE ON shard_chunks",
        # A seal's list takes the place of its references: what is in it is in use as before.
        _mark(
            "chunk_id",
            "gone.chunk_id",
            _POSTGRES_NOW,
            "FROM (SELECT chunk_id FROM rows EXCEPT SELECT e.chunk_id FROM chunk_list_entries e WHERE "
            "e.chunk_list_id IN (SELECT s.chunk_list_id FROM shards s WHERE s.id IN (SELECT shard_id FROM rows))) gone",
        ),
    ),
]


def drop_triggers(connection: Connection) -> None:
    """All of them; also where there are none."""
    postgres = connection.dialect.name == "postgresql"
    tables = set(inspect(connection).get_table_names())
    for name, table in _names():
        if postgres:
            if table in tables:
                _execute(connection, f"DROP TRIGGER IF EXISTS tally_{name} ON {table}")
            _execute(connection, f"DROP FUNCTION IF EXISTS tally_{name}()")
        else:
            _execute(connection, f"DROP TRIGGER IF EXISTS tally_{name}")


def create_triggers(connection: Connection) -> None:
    """Those whose tables the catalog has: it may have been taken back to an older revision. There must be none of them
    yet."""
    tables = set(inspect(connection).get_table_names())
    if connection.dialect.name != "postgresql":
        for name, on, condition, what in _SQLITE:
            when = f"WHEN {condition} " if condition else ""
            if tables.issuperset(_WRITTEN.findall(what)):
                _execute(connection, f"CREATE TRIGGER tally_{name} AFTER {on} FOR EACH ROW {when}BEGIN {what} END")
        return
    for trigger in _of_postgres():
        if tables.issuperset(_WRITTEN.findall(trigger.what)):
            trigger.make(connection)


_WRITTEN = re.compile(r"INSERT INTO (\w+)")


@dataclass(frozen=True)
class _Trigger:
    """One of Postgres, with a function of the same name. The function's comment says which trigger was made."""

    name: str
    table: str
    statement: str
    what: str

    def make(self, connection: Connection) -> None:
        _execute(connection, self._function())
        _execute(connection, self.statement)
        _execute(connection, f"COMMENT ON FUNCTION {self.name}() IS '{self.mark}'")

    def settle(self, connection: Connection) -> None:
        """As the code has it. The table is locked only if the trigger itself differs, and then for a moment."""
        made = connection.execute(_MADE, {"name": self.name}).scalar() or ""
        if made.partition(" ")[0] != self.mark.partition(" ")[0]:
            _execute(connection, f"DROP TRIGGER IF EXISTS {self.name} ON {self.table}")
            self.make(connection)
        elif made != self.mark:
            _execute(connection, self._function())
            _execute(connection, f"COMMENT ON FUNCTION {self.name}() IS '{self.mark}'")

    @property
    def mark(self) -> str:
        """What the trigger is, and what it does."""
        return " ".join(sha256(each.encode()).hexdigest() for each in (self.statement, self.what))

    def _function(self) -> str:
        body = f"BEGIN {self.what} RETURN NULL; END"
        return f"CREATE OR REPLACE FUNCTION {self.name}() RETURNS trigger LANGUAGE plpgsql AS $${body}$$"


def triggers_differ(connection: Connection) -> bool:
    """On Postgres: whether one is not as the code has it, because an upgrade was cut off."""
    made = {row.name: row.mark for row in connection.execute(_ALL_MADE)}
    return made != {trigger.name: trigger.mark for trigger in _of_postgres()}


def settle_triggers() -> list[Callable[[Connection], None]]:
    """For Postgres. Each is to run in a transaction of its own: it locks one table at most."""
    return [*(trigger.settle for trigger in _of_postgres()), _drop_others]


def _of_postgres() -> list[_Trigger]:
    found = []
    for name, on, condition, what in _row_triggers(_POSTGRES_NOW):
        when = f"WHEN ({condition}) " if condition else ""
        found.append(_trigger(name, on, f"FOR EACH ROW {when}", what))
    for name, on, what in _POSTGRES_STATEMENTS:
        which = "OLD" if on.startswith("DELETE") else "NEW"
        found.append(_trigger(name, on, f"REFERENCING {which} TABLE AS rows FOR EACH STATEMENT ", what))
    return found


def _trigger(name: str, on: str, for_each: str, what: str) -> _Trigger:
    name = f"tally_{name}"
    statement = f"CREATE TRIGGER {name} AFTER {on} {for_each}EXECUTE FUNCTION {name}()"
    return _Trigger(name, on.rpartition(" ON ")[2], statement, what)


def _drop_others(connection: Connection) -> None:
    """What an older version had made."""
    kept = {trigger.name for trigger in _of_postgres()}
    for name in sorted({row.name for row in connection.execute(_ALL_MADE)} - kept):
        _execute(connection, f"DROP FUNCTION {name}() CASCADE")


_ALL_MADE = text(
    "SELECT proname AS name, obj_description(oid, 'pg_proc') AS mark FROM pg_proc "
    "WHERE proname LIKE 'tally~_%' ESCAPE '~' AND prorettype = CAST('trigger' AS regtype) "
    "AND pronamespace = CAST(quote_ident(current_schema()) AS regnamespace)"
)
_MADE = text(f"SELECT mark FROM ({_ALL_MADE.text}) AS made WHERE name = :name")


def _execute(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement)


def _names() -> list[tuple[str, str]]:
    """Of every trigger, and the table that it is on."""
    every = [(name, on) for name, on, *_ in (*_SQLITE, *_POSTGRES_STATEMENTS)]
    return sorted({(name, on.rpartition(" ON ")[2]) for name, on in every})
