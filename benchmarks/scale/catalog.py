"""A catalog of a million checkpoints, made by Postgres itself: the rows that years of saves leave, without the saves.

python -m benchmarks.scale.catalog --url postgresql://… [--checkpoints 1000000] [--runs 1000] [--projects 4]

    project ── run ── 3 attempts ── checkpoints ── a shard ── a list of 3 chunks, each with a copy

A checkpoint has one shard: a chunk of state, an index, and the layout that all checkpoints of its run share. The oldest
twentieth of each run is deleted, the next fiftieth is in the trash, and here and there one was aborted. Each attempt
resumed from the newest checkpoint before it; the newest attempt of every twentieth run is alive. The sums in the rows
are those of what they refer to. No object is in the store, so nothing can be read back. The store counts as scanned and
swept just now.

The catalog is migrated and has no project, and no service runs on it meanwhile: the tables' keys and indexes are taken
away and made again, which checks each reference too.
"""

from __future__ import annotations

import argparse
import time

import psycopg
from sqlalchemy import make_url

from holdfast_service.db.tables.tallies import CheckpointDelta, Counted, ListDelta

_DAYS = 20
"""The checkpoints are so old at most: no controller finds one of their copies due to be read again."""
ATTEMPTS = 3
_INDEX_BYTES, _LAYOUT_BYTES = 1500, 6000


def project_of(run: int, projects: int) -> str:
    """The name of the project that has the run of this number, from 1 on."""
    return f"scale-{run % projects}"


def run_name(run: int) -> str:
    return f"run-{run}"


def hex_digest(text: str) -> str:
    """SQL: the SHA-256 of a text as hex digits, as `holdfast_protocol.digests` writes it."""
    return f"encode(sha256(convert_to({text}, 'UTF8')), 'hex')"


def digest_value(digits: str) -> str:
    """SQL: what the catalog's columns keep of a digest in hex digits."""
    return f"decode({digits}, 'hex')"


def shard_digest(chunks: str) -> str:
    """SQL: `digests.shard_digest`. `chunks`: digests in hex digits, a line each."""
    return hex_digest(f"E'holdfast-shard-1\\n' || {chunks} || E'\\n'")


def checkpoint_digest(shards: str) -> str:
    """SQL: `digests.checkpoint_digest`, likewise."""
    return hex_digest(f"E'holdfast-checkpoint-1\\n' || {shards} || E'\\n'")


# Numbers instead of look-ups: run r has layout chunk r; the checkpoint with number n is the k-th that has chunks, and
# has the state chunk :runs + 2k - 1 and the index chunk :runs + 2k. Each id is that number above what is there.
_STATE_CHUNK, _INDEX_CHUNK = "(%(runs)s + 2 * k - 1)", "(%(runs)s + 2 * k)"
_IDS = ("attempts", "shards", "chunk_lists", "chunks", "copies")


def _chunk(number: str) -> str:
    return hex_digest(f"'chunk ' || {number}")


_LINES = f"""{_chunk(_STATE_CHUNK)} || E'\\n' || {_chunk(_INDEX_CHUNK)} || E'\\n' || {_chunk("run")}"""
_AT = f"now() - (1 - n / (%(checkpoints)s + 1.0)) * interval '{_DAYS} days'"


def _added_up(table: type[CheckpointDelta | ListDelta], *of: str) -> str:
    """Puts one delta in place of all those of the same `of`."""
    summed = [column.name for column in table.__table__.columns if column.name not in ("id", *of)]
    return f"""
    WITH taken AS (DELETE FROM {table.__tablename__} RETURNING *)
    INSERT INTO {table.__tablename__} ({", ".join((*of, *summed))})
    SELECT {", ".join((*of, *(f"sum({name})" for name in summed)))} FROM taken GROUP BY {", ".join(of)}
    """


_PLAN = (
    """
    CREATE TEMPORARY TABLE made_runs ON COMMIT DROP AS
    SELECT run, md5('run ' || run) AS run_id, md5('project ' || mod(run, %(projects)s)) AS project_id,
        mod(run, %(projects)s) AS project, mod(run, 20) = 0 AS is_alive
    FROM generate_series(1, %(runs)s) AS run
    """,
    # In the order of time: the runs save in turns. `nth` of `of` in its run.
    f"""
    CREATE TEMPORARY TABLE made ON COMMIT DROP AS
    WITH numbered AS (
        SELECT n, 1 + mod(n - 1, %(runs)s) AS run, 1 + (n - 1) / %(runs)s AS nth, %(checkpoints)s / %(runs)s AS of,
            {_AT} AS at
        FROM generate_series(1::bigint, %(checkpoints)s) AS n
    ), judged AS (
        SELECT *, CASE
            WHEN nth <= of / 20 THEN 'deleted'
            WHEN nth <= of / 20 + of / 50 THEN 'trashed'
            WHEN mod(nth, 33) = 7 THEN 'aborted'
            ELSE 'committed' END AS state,
            least({ATTEMPTS}, 1 + (nth - 1) * {ATTEMPTS} / greatest(of, 1)) AS attempt
        FROM numbered
    ), counted AS (
        SELECT *, CASE WHEN state IN ('committed', 'trashed')
            THEN row_number() OVER (PARTITION BY state IN ('committed', 'trashed') ORDER BY n) END AS k
        FROM judged
    )
    SELECT *, 'ck_' || md5('checkpoint ' || n) AS id, nth * 100 AS step,
        1048576 + mod(n * 7919, 8388608) AS state_bytes,
        k IS NOT NULL AND k = min(k) OVER (PARTITION BY run) AS brings_layout,
        CASE WHEN k IS NOT NULL THEN {shard_digest(_LINES)} END AS shard_digest
    FROM counted
    """,
    "CREATE INDEX ON made (run, nth)",
    "ANALYZE made",
    "ANALYZE made_runs",
)

_ROWS = (
    """
    INSERT INTO projects (id, name, created_at)
    SELECT DISTINCT project_id, 'scale-' || project, now() - interval '30 days' FROM made_runs
    """,
    f"""
    INSERT INTO runs (id, project_id, name, latest_attempt, created_at)
    SELECT run_id, project_id, 'run-' || run, {ATTEMPTS}, now() - interval '30 days' FROM made_runs
    """,
    f"""
    INSERT INTO attempts (id, run_id, number, launch_id, world_size, host, environment, opened_at, heartbeat_at,
        last_step, first_step, steps_run, doing, progressed_at, steps_per_second, excused_until, ended_at, outcome,
        resumed_from_id, offered_id, cut_at)
    SELECT %(attempts)s + (run - 1) * {ATTEMPTS} + number, run_id, number, md5(run || ' launch ' || number), 1,
        'host-' || run, '{{}}', opened_at, ended_at, coalesce(steps.last, 0), coalesce(steps.first, 0),
        coalesce(steps.last - steps.first, 0), 'training', ended_at, 2.5,
        -- Whoever looks finds these jobs alive for a day, and no process has to play them.
        CASE WHEN lives THEN now() + interval '1 day' END,
        CASE WHEN NOT lives THEN ended_at END,
        CASE WHEN lives THEN NULL WHEN number < {ATTEMPTS} THEN 'failed' ELSE 'finished' END,
        before.id, before.id, steps.cut_at
    FROM made_runs CROSS JOIN generate_series(1, {ATTEMPTS}) AS number
    CROSS JOIN LATERAL (
        SELECT is_alive AND number = {ATTEMPTS} AS lives,
            now() - ({ATTEMPTS} + 1 - number) * interval '1 day' * {_DAYS} / {ATTEMPTS} AS opened_at,
            now() - ({ATTEMPTS} - number) * interval '1 day' * {_DAYS} / {ATTEMPTS} AS ended_at
    ) AS when_
    CROSS JOIN LATERAL (
        SELECT min(step) AS first, max(step) AS last, min(at) FILTER (WHERE state <> 'aborted') AS cut_at
        FROM made WHERE made.run = made_runs.run AND made.attempt = number
    ) AS steps
    LEFT JOIN LATERAL (
        SELECT id FROM made
        WHERE made.run = made_runs.run AND made.attempt < number AND made.state <> 'aborted'
        ORDER BY nth DESC LIMIT 1
    ) AS before ON true
    """,
    f"""
    INSERT INTO checkpoints (id, run_id, attempt_id, attempt_number, step, kind, world_size, sealed_ranks, state,
        health, tier, digest, logical_bytes, chunk_bytes, uploaded_bytes, deduplicated_bytes, metrics, labels,
        components, blocked_seconds, version, recorded_version, created_at, deadline_at, committed_at, aborted_at,
        abort_reason, abort_cause, trashed_at, trashed_by, trash_reason, purge_at, deleted_at, forgotten_at)
    SELECT id, run_id, %(attempts)s + (run - 1) * {ATTEMPTS} + attempt, attempt, step, 'periodic', 1,
        is_whole::int, state, 'ok', 'hot',
        {digest_value(checkpoint_digest("shard_digest"))},
        CASE WHEN is_whole THEN state_bytes ELSE 0 END,
        CASE WHEN is_whole THEN state_bytes + {_INDEX_BYTES + _LAYOUT_BYTES} ELSE 0 END,
        CASE WHEN is_whole THEN state_bytes + {_INDEX_BYTES} + brings_layout::int * {_LAYOUT_BYTES} ELSE 0 END,
        CASE WHEN is_whole THEN (NOT brings_layout)::int * {_LAYOUT_BYTES} ELSE 0 END,
        CASE WHEN is_whole THEN jsonb_build_object('loss', jsonb_build_object(
            'value', round(4.0 / (1 + nth / 50.0) + mod(n * 31, 97) / 1000.0, 4), 'nonfinite', NULL)) ELSE '{{}}' END,
        CASE WHEN mod(nth, 50) = 0 THEN '["milestone"]'::jsonb ELSE '[]' END,
        CASE WHEN is_whole THEN jsonb_build_object('model', jsonb_build_object(
            'kind', 'model', 'logical_bytes', state_bytes)) ELSE '{{}}' END,
        CASE WHEN is_whole THEN 0.2 END,
        version, version, at - interval '30 seconds', at + interval '15 minutes',
        CASE WHEN is_whole THEN at END,
        CASE WHEN state = 'aborted' THEN at END,
        CASE WHEN state = 'aborted' THEN 'No rank called for too long.' END,
        CASE WHEN state = 'aborted' THEN 'silent' END,
        CASE WHEN version > 2 THEN greatest(at, now() - interval '10 days') END,
        CASE WHEN version > 2 THEN 'policy' END,
        CASE WHEN version > 2 THEN 'no rule keeps it' END,
        CASE WHEN version > 2 THEN now() + interval '30 days' END,
        CASE WHEN state = 'deleted' THEN now() - interval '1 day' END,
        CASE WHEN k IS NULL THEN now() - interval '1 day' END
    FROM made JOIN made_runs USING (run)
    CROSS JOIN LATERAL (
        SELECT state <> 'aborted' AS is_whole,
            CASE state WHEN 'committed' THEN 2 WHEN 'trashed' THEN 3 WHEN 'deleted' THEN 5 ELSE 1 END AS version
    ) AS of_state
    ORDER BY n
    """,
    f"""
    INSERT INTO chunks (id, project_id, digest, bytes, created_at)
    SELECT %(chunks)s + number, project_id, {digest_value(_chunk("number"))}, bytes, at
    FROM (
        SELECT run AS number, project_id, {_LAYOUT_BYTES} AS bytes, made.at
        FROM made JOIN made_runs USING (run) WHERE brings_layout
        UNION ALL
        SELECT {_STATE_CHUNK}, project_id, state_bytes, at FROM made JOIN made_runs USING (run) WHERE k IS NOT NULL
        UNION ALL
        SELECT {_INDEX_CHUNK}, project_id, {_INDEX_BYTES}, at FROM made JOIN made_runs USING (run) WHERE k IS NOT NULL
    ) AS needed
    ORDER BY number
    """,
    f"""
    INSERT INTO copies (id, chunk_id, project_id, store_id, attempt_id, generation, state, proof, codec, stored_digest,
        stored_bytes, counted, ticket_expires_at, created_at, verified_at)
    SELECT %(copies)s + number, %(chunks)s + number, project_id, %(store)s,
        %(attempts)s + (run - 1) * {ATTEMPTS} + attempt,
        decode(md5('copy ' || number), 'hex'), 'verified', 'read', 'raw',
        {digest_value(_chunk("number"))}, bytes,
        CASE WHEN state = 'committed' OR (number = run AND EXISTS (
            SELECT FROM made AS other WHERE other.run = needed.run AND other.state = 'committed'
        )) THEN {int(Counted.COMMITTED)} ELSE {int(Counted.TRASHED)} END,
        at, at, at
    FROM (
        SELECT run AS number, {_LAYOUT_BYTES} AS bytes, made.* FROM made WHERE brings_layout
        UNION ALL
        SELECT {_STATE_CHUNK}, state_bytes, made.* FROM made WHERE k IS NOT NULL
        UNION ALL
        SELECT {_INDEX_CHUNK}, {_INDEX_BYTES}, made.* FROM made WHERE k IS NOT NULL
    ) AS needed JOIN made_runs USING (run)
    ORDER BY number
    """,
    f"""
    INSERT INTO chunk_lists (id, project_id, entries, digest, entries_digest)
    SELECT %(chunk_lists)s + k, project_id, 3, {digest_value("shard_digest")}, {
        digest_value(
            hex_digest(f'''
        (%(chunks)s + {_STATE_CHUNK}) || ',' || (%(chunks)s + {_INDEX_CHUNK}) || ',' || (%(chunks)s + run)''')
        )
    }
    FROM made JOIN made_runs USING (run) WHERE k IS NOT NULL
    ORDER BY k
    """,
    f"""
    INSERT INTO chunk_list_entries (chunk_list_id, ordinal, chunk_id)
    SELECT %(chunk_lists)s + k, ordinal,
        %(chunks)s + CASE ordinal WHEN 0 THEN {_STATE_CHUNK} WHEN 1 THEN {_INDEX_CHUNK} ELSE run END
    FROM made CROSS JOIN generate_series(0, 2) AS ordinal WHERE k IS NOT NULL
    ORDER BY k, ordinal
    """,
    f"""
    INSERT INTO shards (id, checkpoint_id, rank, state, digest, chunk_list_id, index_ordinal, layout_ordinal,
        logical_bytes, uploaded_bytes, deduplicated_bytes, components, metrics, finite, blocked_seconds, upload_seconds,
        sealed_at)
    SELECT %(shards)s + n, id, 0, CASE WHEN state = 'aborted' THEN 'open' ELSE 'sealed' END,
        {digest_value("shard_digest")},
        %(chunk_lists)s + k, 1, 2, checkpoints.logical_bytes, checkpoints.uploaded_bytes,
        checkpoints.deduplicated_bytes, checkpoints.components, checkpoints.metrics, true, 0.2, 1.5,
        checkpoints.committed_at
    FROM made JOIN checkpoints USING (id, state)
    ORDER BY n
    """,
    # The store is told to have all records: none is due.
    """
    INSERT INTO record_subjects (kind, subject_id, project_id, version, recorded_version)
    SELECT DISTINCT 'project', project_id, project_id, 1, 1 FROM made_runs
    UNION ALL SELECT 'run', run_id, project_id, 1, 1 FROM made_runs
    """,
    """
    INSERT INTO written_records (kind, subject_id, store_id, version, removed_at)
    SELECT kind, subject_id, %(store)s, 1, NULL::timestamptz FROM record_subjects
        WHERE subject_id IN (SELECT run_id FROM made_runs UNION SELECT project_id FROM made_runs)
    UNION ALL
    SELECT 'checkpoint', id, %(store)s, version, deleted_at FROM made JOIN checkpoints USING (id)
        WHERE made.state <> 'aborted'
    """,
    # The copies are counted as what they are, so nothing is left to recount.
    "DELETE FROM recount_marks",
    # The triggers have made one for each row: a service would take minutes to add them up.
    _added_up(CheckpointDelta, "project_id", "run_id"),
    _added_up(ListDelta, "project_id"),
    # A sweep would find no object of any copy, and every checkpoint corrupt.
    """
    INSERT INTO store_maintenance (store_id, scan_began_at, swept_at) VALUES (%(store)s, now(), now())
    ON CONFLICT (store_id) DO UPDATE SET scan_began_at = now(), swept_at = now()
    """,
)


# Keys are made once, from all rows, which takes a tenth of the time. Primary keys stay, because others refer to them,
# and so do those of partitions, because only the whole table can make them again.
_FILLED = (
    "attempts",
    "checkpoints",
    "chunk_list_entries",
    "chunk_lists",
    "chunks",
    "copies",
    "shards",
    "written_records",
)
_PLAIN_TABLES = "SELECT oid FROM pg_class WHERE oid = ANY(%s::regclass[]) AND relkind = 'r' AND NOT relispartition"
_KEYS = f"""
    SELECT format('ALTER TABLE %%s DROP CONSTRAINT %%I', conrelid::regclass, conname),
        format('ALTER TABLE %%s ADD CONSTRAINT %%I %%s', conrelid::regclass, conname, pg_get_constraintdef(oid))
    FROM pg_constraint WHERE contype IN ('u', 'f') AND conrelid IN ({_PLAIN_TABLES})
    ORDER BY contype  -- foreign keys first
"""
_INDEXES = f"""
    SELECT format('DROP INDEX %%s', indexrelid::regclass), pg_get_indexdef(indexrelid)
    FROM pg_index WHERE indrelid IN ({_PLAIN_TABLES})
        AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND contype IN ('u', 'p'))
"""


class NotEmptyError(RuntimeError):
    """The catalog has projects. Give an empty one."""


def fill(
    connection: psycopg.Connection[tuple[object, ...]],
    *,
    checkpoints: int = 1_000_000,
    runs: int = 1000,
    projects: int = 4,
    store_url: str = "posix:///scale",
) -> None:
    """In one transaction; then VACUUM and ANALYZE, so the connection must be in autocommit mode. Rows are written in
    the order of their ids. `store_url`: of the store that a service will attach, if none has been attached yet. Raises
    NotEmptyError."""
    with connection.transaction():
        if connection.execute("SELECT id FROM projects LIMIT 1").fetchone() is not None:
            raise NotEmptyError("the catalog has projects already; give an empty, migrated one")
        connection.execute("SET LOCAL maintenance_work_mem = '512MB'; SET LOCAL work_mem = '256MB'")
        numbers = {"checkpoints": checkpoints, "runs": min(runs, checkpoints), "projects": projects}
        numbers |= {table: _highest_id(connection, table) for table in _IDS}
        numbers["store"] = _store(connection, store_url)
        keys = [row for found in (_KEYS, _INDEXES) for row in connection.execute(found, [list(_FILLED)]).fetchall()]
        for drop, _ in keys:
            connection.execute(str(drop))
        for statement in (*_PLAN, *_ROWS):
            connection.execute(_with_numbers(statement, numbers))
        for _, add in reversed(keys):  # foreign keys last: they look at what they refer to by the other indexes
            connection.execute(str(add))
        for table in _IDS:
            connection.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), greatest(1, (SELECT max(id) FROM {table})))"
            )
    connection.execute("VACUUM (ANALYZE)")


def _with_numbers(statement: str, numbers: dict[str, int]) -> str:
    """As literals: the planner knows them, and CREATE TABLE AS takes no parameters."""
    return statement % {name: str(int(value)) for name, value in numbers.items()}


def _highest_id(connection: psycopg.Connection[tuple[object, ...]], table: str) -> int:
    return _number(connection, f"SELECT coalesce(max(id), 0) FROM {table}")


def _store(connection: psycopg.Connection[tuple[object, ...]], url: str) -> int:
    """The first one that a service has attached, else a new row."""
    if connection.execute("SELECT id FROM stores LIMIT 1").fetchone() is None:
        connection.execute("INSERT INTO stores (url, kind, created_at) VALUES (%s, 'posix', now())", [url])
    return _number(connection, "SELECT min(id) FROM stores")


def _number(connection: psycopg.Connection[tuple[object, ...]], statement: str) -> int:
    row = connection.execute(statement).fetchone()
    assert row is not None
    return int(str(row[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of an empty, migrated catalog on Postgres")
    parser.add_argument("--checkpoints", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--projects", type=int, default=4)
    wanted = parser.parse_args()
    dsn = make_url(wanted.url).set(drivername="postgresql").render_as_string(hide_password=False)
    began = time.monotonic()
    with psycopg.connect(dsn, autocommit=True) as connection:
        fill(connection, checkpoints=wanted.checkpoints, runs=wanted.runs, projects=wanted.projects)
    print(f"{wanted.checkpoints} checkpoints in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
