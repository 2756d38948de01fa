"""A migration on Postgres while jobs save: no revision works all over a big table, and none makes saves wait behind a
lock that it waits for itself."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import inspect, text
from structlog.testing import capture_logs

from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import (
    CatalogTooNewError,
    MigrationBlockedError,
    alembic_config,
    exclusive_connection,
    pending_steps,
    upgrade,
)
from holdfast_service.db.triggers import triggers_differ
from holdfast_service.settings import ServiceSettings
from tests.support.big_tables import watched
from tests.support.databases import PostgresCatalogs
from tests.support.postgres import PostgresServer
from tests.support.rank import Job, answer
from tests.support.service import running_service
from tests.support.trial_revision import COLUMN, INDEX, later_revisions


@pytest.fixture
def database_url(postgres_catalogs: PostgresCatalogs) -> str:
    """Not given back: a trial has changed its tables."""
    return postgres_catalogs.new()


FIRST = "0011"
WORKS_FROM_IS_NEW = "0035"
LOCKED_FOR_LONG = {"0013", "0014", "0015", "0017", "0026"}
"""Released before the rule. Upgrade from before them with the services stopped: docs/operating/upgrade.md."""
TAKES_AWAY = {"0015", "0017", "0027"}
"""Likewise, before a catalog said which versions it works with."""


@pytest.fixture
def empty(postgres: PostgresServer) -> Iterator[Database]:
    name = f"upgrade_{secrets.token_hex(6)}"
    database = Database(postgres.create_database(name))
    yield database
    database.dispose()
    postgres.drop_database(name)


def to(database: Database, revision: str) -> None:
    with exclusive_connection(database) as connection:
        command.upgrade(alembic_config(connection), revision)


def test_no_revision_works_all_over_a_big_table_or_takes_something_away_unsaid(empty: Database) -> None:
    to(empty, FIRST)
    with watched(empty) as found:
        applied = upgrade(empty)
    assert applied[0].revision == "0012"
    assert {revision for revision, wrong in found.wrong.items() if wrong} <= LOCKED_FOR_LONG, found.wrong
    takes_away = {revision for revision, statements in found.takes_away.items() if statements}
    unsaid = takes_away - TAKES_AWAY
    with empty.read() as session:
        default = inspect(session.connection()).get_columns("catalog_identity")
    said = next(str(each["default"]) for each in default if each["name"] == "works_from")
    newest = max(unsaid, default=WORKS_FROM_IS_NEW)
    assert f"'{newest}'" in said, f"{newest} takes something away: it must set works_from. {found.takes_away}"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE INDEX ON checkpoints (step)",
        "ALTER TABLE chunk_list_entries ALTER COLUMN ordinal TYPE numeric",
        "ALTER TABLE chunks ADD COLUMN x double precision NOT NULL DEFAULT random()",
        "ALTER TABLE shards ADD CONSTRAINT c CHECK (rank >= 0)",
        "ALTER TABLE checkpoints ALTER COLUMN pinned_at SET NOT NULL",
        "UPDATE checkpoints SET step = step",
        "INSERT INTO attempts SELECT * FROM attempts",
    ],
)
def test_the_watch_sees_what_would_lock_a_big_table(statement: str, settings: ServiceSettings) -> None:
    database = Database(settings.database_url_text)
    with watched(database) as found, database.engine.begin() as connection:
        connection.exec_driver_sql(statement)
    database.dispose()
    assert any(found.wrong.values()), statement


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE checkpoints ADD COLUMN x bigint",
        "ALTER TABLE chunks ADD COLUMN x integer NOT NULL DEFAULT 0",
        "ALTER TABLE shards ADD CONSTRAINT c CHECK (rank >= 0) NOT VALID",
        "CREATE TABLE another (id bigint PRIMARY KEY)",
        "UPDATE projects SET name = name",
    ],
)
def test_the_watch_lets_pass_what_takes_a_moment(statement: str, settings: ServiceSettings) -> None:
    database = Database(settings.database_url_text)
    with watched(database) as found, database.engine.begin() as connection:
        connection.exec_driver_sql(statement)
    database.dispose()
    assert not any(found.wrong.values()), found.wrong


def test_saves_go_on_while_a_revision_waits_for_a_table(settings: ServiceSettings, tmp_path: Path) -> None:
    """Somebody's transaction has read the table and stays open: the revision cannot have its lock, and gives up its
    turn each time, so that saves pass."""
    with running_service(settings) as service, later_revisions(tmp_path, COLUMN, INDEX) as names:
        database = service.context.database
        reader = database.engine.connect()
        reader.execute(text("SELECT count(*) FROM checkpoints"))
        job = Job(service.http())
        with capture_logs() as logs, ThreadPoolExecutor(1) as another:
            migrating = another.submit(upgrade, database)
            step = 0
            while len([each for each in logs if each["event"] == "migration_waits"]) < 2:
                step += 1
                assert job.save(step)["state"] == "committed"
                assert not migrating.done()
            reader.close()
            while not migrating.done():
                step += 1
                assert job.save(step)["state"] == "committed"
        assert [each.revision for each in migrating.result()] == names
        waits = next(each for each in logs if each["event"] == "migration_waits")
        assert "holdfast" in waits["oldest_transaction"]
        assert job.save(step + 1)["state"] == "committed"
        with database.read() as session:
            connection = session.connection()
            assert "ix_checkpoints_trial" in {each["name"] for each in inspect(connection).get_indexes("checkpoints")}
            assert not triggers_differ(connection)
        with watched(database) as found:
            assert upgrade(database) == []
        assert not found.statements, "nothing is left to do"


def test_an_index_that_was_cut_off_is_made_again(settings: ServiceSettings, tmp_path: Path) -> None:
    database = Database(settings.database_url_text)
    with later_revisions(tmp_path, COLUMN, INDEX), watched(database) as found:
        with database.engine.connect() as connection:
            # As a CREATE INDEX CONCURRENTLY leaves it whose process was killed.
            connection.exec_driver_sql("CREATE INDEX ix_checkpoints_trial ON checkpoints (id)")
            connection.commit()
        found.wrong.clear()
        upgrade(database)
        assert not any(found.wrong.values()), found.wrong
        with database.read() as session:
            indexes = inspect(session.connection()).get_indexes("checkpoints")
    assert next(each for each in indexes if each["name"] == "ix_checkpoints_trial")["column_names"][0] == "run_id"
    database.dispose()


def test_who_keeps_a_migration_waiting_is_named_and_a_later_one_goes_on(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    database = Database(settings.database_url_text)
    with later_revisions(tmp_path, COLUMN) as names:
        with database.engine.connect() as reader:
            reader.execute(text("SELECT count(*) FROM checkpoints"))
            with pytest.raises(MigrationBlockedError, match=r"process [0-9]+ \(holdfast\)"):
                upgrade(database, wait_seconds=0)
        assert [each.revision for each in pending_steps(database)] == names
        assert [each.revision for each in upgrade(database)] == names
    database.dispose()


def test_triggers_that_an_upgrade_did_not_come_to_are_made_at_the_next_start(settings: ServiceSettings) -> None:
    database = Database(settings.database_url_text)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER tally_checkpoint_added ON checkpoints")
        connection.exec_driver_sql("COMMENT ON FUNCTION tally_checkpoint_added() IS 'older older'")
        connection.exec_driver_sql("COMMENT ON FUNCTION tally_hold_added() IS NULL")
        connection.exec_driver_sql("CREATE FUNCTION tally_gone() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN END'")
    upgrade(database)
    with database.read() as session:
        assert not triggers_differ(session.connection())
        assert session.scalar(text("SELECT count(*) FROM pg_trigger WHERE tgname = 'tally_checkpoint_added'")) == 1
    database.dispose()


def test_a_service_of_an_older_version_starts_on_a_catalog_that_was_expanded(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    """The way back: the revision is newer than what this version knows, and takes nothing away."""
    database = Database(settings.database_url_text)
    with running_service(settings), later_revisions(tmp_path, COLUMN):
        upgrade(database)
    with running_service(settings) as service:
        assert Job(service.http()).save(1)["state"] == "committed"
        assert answer(service.http(token=None).get("/readyz"))["ready"]
        with database.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE catalog_identity SET works_from = 'trial_1'")
        assert service.http(token=None).get("/readyz").status_code == 503
    with pytest.raises(CatalogTooNewError, match="works with revision trial_1"):
        upgrade(database)
    database.dispose()


def test_two_that_migrate_at_once_are_one(settings: ServiceSettings, tmp_path: Path) -> None:
    databases = [Database(settings.database_url_text) for _ in range(3)]
    at_once = threading.Barrier(len(databases))

    def migrate(database: Database) -> int:
        at_once.wait(60)
        return len(upgrade(database))

    with later_revisions(tmp_path, COLUMN, INDEX), ThreadPoolExecutor(len(databases)) as each:
        assert sorted(each.map(migrate, databases)) == [0, 0, 2]
    for database in databases:
        database.dispose()
