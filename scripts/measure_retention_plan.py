"""How long a plan takes: 100,000 checkpoints of one run with ten million chunk references, on Postgres.

    .venv/bin/python scripts/measure_retention_plan.py [--checkpoints 100000] [--unproven 0] [--explain FILE]

It starts a Postgres of its own, fills a catalog by INSERT … SELECT generate_series, and plans as the service does:
facts, rules, bytes. Each checkpoint has a list of 100 chunks of its own: 20 that it alone has, 30 that it shares with
the nine beside it, 50 that all of a thousand share. Figures go to stdout; --explain writes the query plans. Of the
newest `--unproven` checkpoints nobody has read the chunks that they alone have: how long is the way to what is proven?
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from sqlalchemy import event, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.databases import migrate
from tests.support.postgres import postgres_server

from holdfast_protocol.policies.retention import PRESETS
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import Run
from holdfast_service.retention.plan import make_plan
from holdfast_service.retention.read_facts import read_facts
from holdfast_service.retention.show_plan import freed_bytes

OWN, OF_TEN, OF_THOUSAND = 20, 30, 50
STATEMENTS = (
    "INSERT INTO projects (id, name, created_at) VALUES ('p', 'demo', now())",
    "INSERT INTO stores (id, url, kind, created_at) VALUES (1, 'posix:///a', 'posix', now())",
    "INSERT INTO runs (id, project_id, name, latest_attempt, created_at) VALUES ('r', 'p', 'gpt', 1, now())",
    "INSERT INTO attempts (id, run_id, number, launch_id, world_size, host, environment, opened_at, cut_at) "
    "VALUES (1, 'r', 1, 'l', 1, '', '{}', now(), now())",
    "INSERT INTO checkpoints (id, run_id, attempt_id, attempt_number, step, kind, world_size, state, health, tier, "
    "digest, logical_bytes, chunk_bytes, uploaded_bytes, metrics, labels, components, version, created_at, "
    "deadline_at, committed_at) SELECT 'ck_' || md5(i::text), 'r', 1, 1, i * 10, 'periodic', 1, 'committed', "
    "CASE WHEN i % 500 = 7 THEN 'diverged' ELSE 'ok' END, 'hot', md5(i::text), 1, 1, 1, "
    """jsonb_build_object('loss', jsonb_build_object('value', 1.0 / (i + 1))), """
    "CASE WHEN i % 5000 = 0 THEN '[\"milestone\"]'::jsonb ELSE '[]'::jsonb END, '{}', 1, moment, moment, moment "
    "FROM (SELECT i, timestamptz '2026-01-01' + i * interval '10 minutes' AS moment "
    "FROM generate_series(0, :checkpoints - 1) i) each",
    # Chunks are numbered: first those of one checkpoint each, then those of ten, then those of a thousand.
    "INSERT INTO chunks (id, project_id, digest, bytes, created_at) SELECT n, 'p', md5(n::text), 1000000, now() "
    "FROM generate_series(1, :chunks) n",
    "INSERT INTO copies (chunk_id, project_id, store_id, attempt_id, generation, state, proof, codec, stored_digest, "
    "stored_bytes, ticket_expires_at, created_at, verified_at) SELECT n, 'p', 1, 1, md5(n::text), 'verified', "
    "'store_sha256', 'raw', md5(n::text), 900000 + n % 1000, now(), now(), now() FROM generate_series(1, :chunks) n",
    "INSERT INTO chunk_lists (id, project_id, digest, entries_digest) SELECT i, 'p', md5(i::text), md5(i::text) "
    "FROM generate_series(0, :checkpoints - 1) i",
    "INSERT INTO chunk_list_entries (chunk_list_id, ordinal, chunk_id) SELECT i, o, CASE "
    f"WHEN o < {OWN} THEN 1 + i * {OWN} + o "
    f"WHEN o < {OWN + OF_TEN} THEN 1 + :checkpoints * {OWN} + i / 10 * {OF_TEN} + (o - {OWN}) "
    f"ELSE 1 + :checkpoints * {OWN} + :checkpoints / 10 * {OF_TEN} + i / 1000 * {OF_THOUSAND} + (o - {OWN + OF_TEN}) "
    "END FROM generate_series(0, :checkpoints - 1) i, generate_series(0, 99) o",
    "INSERT INTO shards (id, checkpoint_id, rank, state, chunk_list_id, components, finite, "
    "logical_bytes, uploaded_bytes) "
    "SELECT i, 'ck_' || md5(i::text), 0, 'sealed', i, '{}', true, 1, 1 FROM generate_series(0, :checkpoints - 1) i",
)


def fill(database: Database, checkpoints: int) -> None:
    chunks = checkpoints * OWN + checkpoints // 10 * OF_TEN + max(1, checkpoints // 1000) * OF_THOUSAND
    with database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))  # no foreign keys: they are right
        for statement in STATEMENTS:
            session.execute(
                text(statement), {"checkpoints": checkpoints, "chunks": chunks} if ":c" in statement else {}
            )
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))


def leave_unproven(database: Database, checkpoints: int, newest: int) -> None:
    with database.transaction() as session:
        session.execute(
            text("UPDATE copies SET proof = 'unproven' WHERE chunk_id > :first AND chunk_id <= :last"),
            {"first": (checkpoints - newest) * OWN, "last": checkpoints * OWN},
        )
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE copies"))


def explained(connection: Connection, seen: list[str]) -> None:
    """Each statement that reads is explained as it runs, in a second execution right after the first."""

    def after(**ran: Any) -> None:
        # What is put aside comes from a SELECT, too.
        query = ran["statement"].removeprefix("INSERT INTO their_chunks (chunk_id) ")
        if query.startswith("SELECT") and "clock_timestamp" not in query:
            with ran["conn"].connection.cursor() as again:
                again.execute(f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {query}", ran["parameters"])
                seen.append(query + "\n" + "\n".join(row[0] for row in again.fetchall()))

    event.listen(connection, "after_cursor_execute", after, named=True)


def cpu_seconds(pid: int) -> float:
    """Of a process so far. A busy machine stretches the clock's seconds, and not these."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def planned(session: Session, say: bool = True) -> float:
    """Seconds of the whole plan."""
    backend = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
    used = cpu_seconds(backend), time.process_time()
    run = session.scalars(select(Run)).one()
    rules = PRESETS["tiered"]
    began = time.monotonic()
    facts = read_facts(session, run, rules)
    read = time.monotonic()
    decisions = make_plan(rules, facts)
    decided = time.monotonic()
    expiring = [each.fact.id for each in decisions if not each.keep]
    freed = freed_bytes(session, expiring)
    ended = time.monotonic()
    if say:
        print(f"checkpoints {len(decisions)}, expire {len(expiring)}, freed {freed.bytes} bytes")
        cpu = cpu_seconds(backend) - used[0], time.process_time() - used[1]
        print(f"CPU: database {cpu[0]:.1f} s, service {cpu[1]:.1f} s")
        print(f"facts {read - began:.1f} s, rules {decided - read:.1f} s, bytes {ended - decided:.1f} s")
    return ended - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=100_000, help="a multiple of 1,000")
    parser.add_argument("--unproven", type=int, default=0, help="of how many, the newest, nobody has read the chunks")
    parser.add_argument("--explain", type=Path, help="write the query plans to this file")
    chosen = parser.parse_args()
    with postgres_server(own=True) as server:
        url = server.create_database("retention_plan")
        migrate(url)
        database = Database(url)
        began = time.monotonic()
        fill(database, chosen.checkpoints)
        if chosen.unproven:
            leave_unproven(database, chosen.checkpoints, chosen.unproven)
        print(f"filled in {time.monotonic() - began:.0f} s: {chosen.checkpoints * 100} chunk references")
        with database.read() as session:
            seconds = planned(session)
        print(f"plan {seconds:.1f} s, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")
        if chosen.explain is not None:
            seen: list[str] = []
            with database.read() as session:
                explained(session.connection(), seen)
                planned(session, say=False)
            chosen.explain.write_text("\n\n".join(seen) + "\n", encoding="utf-8")
        database.dispose()


if __name__ == "__main__":
    main()
