"""The revisions: the same tables as the code says on both databases, back and forth, and two starts at once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import insert, inspect, select, text
from sqlalchemy.exc import IntegrityError

import holdfast_service.db.migrate
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import (
    CatalogTooNewError,
    alembic_config,
    exclusive_connection,
    migrations_folder,
    pending_revision,
    upgrade,
)
from holdfast_service.db.tables import Table
from holdfast_service.db.tables.core import CatalogIdentity, Checkpoint, Chunk, ChunkList, Copy, Shard, Token
from holdfast_service.db.tables.operations import IdempotencyKey, Operation
from holdfast_service.db.tables.records import FoundEncoding
from tests.support.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Without any table."""
    if request.param == "sqlite":
        database = Database(f"sqlite:///{tmp_path / 'catalog.db'}")
        yield database
        database.dispose()
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"migrations_{secrets.token_hex(6)}"
    database = Database(server.create_database(name))
    yield database
    database.dispose()
    server.drop_database(name)


def tables(database: Database) -> set[str]:
    return set(inspect(database.engine).get_table_names()) - {"alembic_version"}


def test_the_revisions_make_what_the_code_says(database: Database) -> None:
    upgrade(database)
    assert tables(database) == set(Table.metadata.tables)
    with exclusive_connection(database) as connection:
        command.check(alembic_config(connection))  # raises if a revision is missing
        assert pending_revision(connection) is None


def test_a_start_with_nothing_to_migrate_waits_for_no_other_that_migrates(database: Database) -> None:
    upgrade(database)
    with ThreadPoolExecutor(1) as another, exclusive_connection(database):
        another.submit(upgrade, database).result(timeout=30)


def test_the_newest_revision_can_be_taken_back_and_put_on_again(database: Database) -> None:
    upgrade(database)
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "-1")
        assert pending_revision(connection) is not None
    upgrade(database)
    assert tables(database) == set(Table.metadata.tables)


def test_digests_become_bytes_and_text_again_with_all_that_refers_to_their_rows(database: Database) -> None:
    """Every table whose rows revision 0015 writes anew, nulls among them."""
    names = ["a0" * 32, "b1" * 32]
    generation = names[1][:32]
    with exclusive_connection(database) as connection:
        command.upgrade(alembic_config(connection), "0013")
        for statement in _ROWS:
            connection.execute(text(statement), {"digest": names[0], "other": names[1], "generation": generation})
    upgrade(database)
    with database.read() as session:
        for column in (Token.secret_sha256, IdempotencyKey.asked, Operation.fingerprint):
            assert session.scalar(select(column)) == names[0]
        digests = {row.id: row.digest for row in session.execute(select(Checkpoint.id, Checkpoint.digest))}
        assert digests == {"c1": names[0], "c2": None}
        assert session.execute(select(ChunkList.digest, ChunkList.entries_digest)).one() == (names[0], names[1])
        assert list(session.scalars(select(Shard.digest).order_by(Shard.rank))) == [names[0], None]
        assert list(session.scalars(select(Chunk.digest).order_by(Chunk.digest))) == names
        assert session.execute(select(Copy.generation, Copy.stored_digest)).one() == (generation, names[0])
        assert session.execute(select(FoundEncoding.digest, FoundEncoding.stored_digest)).one() == (names[0], names[1])
        assert session.scalar(text("SELECT length(digest) FROM chunks WHERE id = 1")) == 32
    with pytest.raises(IntegrityError), database.transaction() as session:  # the constraint has come along
        session.add(Chunk(project_id="p", digest=names[0], bytes=1, created_at=datetime.now(UTC)))
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "0013")
        assert connection.execute(text("SELECT digest FROM chunks ORDER BY id")).scalars().all() == names
        assert connection.execute(text("SELECT generation, stored_digest FROM copies")).one() == (generation, names[0])
        assert connection.execute(text("SELECT digest FROM shards WHERE rank = 1")).scalar() is None
    upgrade(database)
    with exclusive_connection(database) as connection:
        command.check(alembic_config(connection))


_ROWS = (
    "INSERT INTO projects (id, name, created_at) VALUES ('p', 'p', '2026-01-01 00:00:00+00:00')",
    "INSERT INTO stores (id, url, kind, created_at) VALUES (1, 'posix:///s', 'posix', '2026-01-01 00:00:00+00:00')",
    "INSERT INTO tokens (id, name, secret_sha256, scopes, created_at) "
    "VALUES ('t', 't', :digest, '[]', '2026-01-01 00:00:00+00:00')",
    "INSERT INTO idempotency_keys (token_id, key, asked, created_at) "
    "VALUES ('t', 'k', :digest, '2026-01-01 00:00:00+00:00')",
    "INSERT INTO runs (id, project_id, name, latest_attempt, created_at) "
    "VALUES ('r', 'p', 'r', 1, '2026-01-01 00:00:00+00:00')",
    "INSERT INTO attempts (id, run_id, number, launch_id, world_size, host, environment, opened_at) "
    "VALUES (1, 'r', 1, 'l', 2, 'h', '{}', '2026-01-01 00:00:00+00:00')",
    *(
        "INSERT INTO checkpoints (id, run_id, attempt_id, attempt_number, step, kind, world_size, state, health, tier, "
        "digest, logical_bytes, chunk_bytes, uploaded_bytes, metrics, labels, components, version, created_at, "
        f"deadline_at) VALUES ('{name}', 'r', 1, 1, {step}, 'periodic', 2, '{state}', 'ok', 'hot', {digest}, 0, 0, 0, "
        "'{}', '[]', '{}', 1, '2026-01-01 00:00:00+00:00', '2026-01-01 00:00:00+00:00')"
        for name, step, state, digest in (("c1", 1, "committed", ":digest"), ("c2", 2, "uploading", "NULL"))
    ),
    "INSERT INTO operations (id, kind, checkpoint_id, arguments, fingerprint, state, progress, created_at, created_by, "
    "created_by_token, tries) "
    "VALUES ('o', 'k', 'c1', '{}', :digest, 'queued', '{}', '2026-01-01 00:00:00+00:00', 'x', 't', 0)",
    "INSERT INTO chunk_lists (id, project_id, digest, entries_digest) VALUES (1, 'p', :digest, :other)",
    "INSERT INTO chunks (id, project_id, digest, bytes, created_at) "
    "VALUES (1, 'p', :digest, 1, '2026-01-01 00:00:00+00:00'), (2, 'p', :other, 1, '2026-01-01 00:00:00+00:00')",
    "INSERT INTO chunk_list_entries (chunk_list_id, ordinal, chunk_id) VALUES (1, 0, 1)",
    *(
        "INSERT INTO shards (checkpoint_id, rank, state, digest, chunk_list_id, logical_bytes, uploaded_bytes, "
        f"components, finite) VALUES ('c1', {rank}, '{state}', {digest}, {chunk_list}, 0, 0, '{{}}', true)"
        for rank, state, digest, chunk_list in ((0, "sealed", ":digest", "1"), (1, "open", "NULL", "NULL"))
    ),
    "INSERT INTO copies (id, chunk_id, project_id, store_id, attempt_id, generation, state, codec, stored_digest, "
    "stored_bytes, ticket_expires_at, created_at) VALUES (1, 1, 'p', 1, 1, :generation, 'verified', 'raw', :digest, 1, "
    "'2026-01-01 00:00:00+00:00', '2026-01-01 00:00:00+00:00')",
    "INSERT INTO found_encodings (project_id, digest, stored_bytes, codec, stored_digest) "
    "VALUES ('p', :digest, 1, 'zstd', :other)",
)


def test_autovacuum_knows_each_kind_of_table(postgres: PostgresServer) -> None:
    name = f"migrations_{secrets.token_hex(6)}"
    database = Database(postgres.create_database(name))
    upgrade(database)
    with database.read() as session:
        rows = session.execute(text("SELECT relname, reloptions FROM pg_class WHERE relkind = 'r'")).all()
    options = {row.relname: dict(each.split("=") for each in row.reloptions or ()) for row in rows}
    for table in ("chunks", "copies", "chunk_list_entries", "shards", "checkpoints"):
        assert float(options[table]["autovacuum_vacuum_scale_factor"]) <= 0.01
        assert float(options[table]["autovacuum_vacuum_insert_scale_factor"]) <= 0.01
    for table in ("shard_chunks", "read_leases", "collect_candidates"):
        assert options[table]["autovacuum_vacuum_scale_factor"] == "0"
    for table in ("attempts", "runs", "operations", "controllers"):
        assert int(options[table]["autovacuum_vacuum_threshold"]) <= 500
    assert options["chunk_list_entries"]["autovacuum_freeze_min_age"] == "0"
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "0015")
        left = connection.execute(text("SELECT relname FROM pg_class WHERE reloptions IS NOT NULL AND relkind = 'r'"))
        assert left.all() == []
    database.dispose()
    postgres.drop_database(name)


def test_services_that_start_at_once_migrate_once(database: Database) -> None:
    with ThreadPoolExecutor(4) as starts:
        applied = list(starts.map(lambda _: upgrade(database), range(4)))
    assert len([each for each in applied if each]) == 1
    assert tables(database) == set(Table.metadata.tables)


def test_an_upgrade_that_fails_leaves_nothing_behind(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.upgrade

    def fails_at_the_end(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        raise RuntimeError("killed")

    monkeypatch.setattr(holdfast_service.db.migrate.command, "upgrade", fails_at_the_end)
    with pytest.raises(RuntimeError, match="killed"):
        upgrade(database)
    assert tables(database) == set()


def test_a_catalog_of_a_newer_version_is_left_alone(database: Database) -> None:
    upgrade(database)
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        session.execute(insert(CatalogIdentity).values(_IDENTITY | {"works_from": "9998"}))
    with pytest.raises(CatalogTooNewError, match=r"9999.*9998"):
        upgrade(database)
    with database.read() as session:
        assert pending_revision(session.connection()) is not None


def test_a_newer_catalog_that_says_so_works_with_this_version(database: Database) -> None:
    upgrade(database)
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        session.execute(insert(CatalogIdentity).values(_IDENTITY))
    assert upgrade(database) == []
    with database.read() as session:
        assert pending_revision(session.connection()) is None
        assert session.scalar(text("SELECT version_num FROM alembic_version")) == "9999"


_IDENTITY = {"id": 1, "catalog_id": "c", "epoch": 1, "signing_key": b"", "created_at": datetime(2026, 1, 1, tzinfo=UTC)}


def test_the_revisions_are_found_in_a_checkout_and_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (migrations_folder() / "env.py").is_file()
    package = tmp_path / "site-packages" / "holdfast_service"
    (package / "migrations").mkdir(parents=True)
    monkeypatch.setattr(holdfast_service.db.migrate, "__file__", str(package / "db" / "migrate.py"))
    assert migrations_folder() == package / "migrations"
