"""What the views promise: their names, columns and types, as documented and for as long as they are called v1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from pydantic import SecretStr
from sqlalchemy import Connection, Text, inspect, text
from sqlalchemy.exc import DBAPIError

from holdfast_service.dashboards.definition import POSTGRES, SQLITE, Column, Kind, View
from holdfast_service.dashboards.role import DashboardRoleError, put_role, remove_role
from holdfast_service.dashboards.views import all_views, create_views, drop_views, ensure_views, meaning_of
from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import alembic_config, exclusive_connection, upgrade
from holdfast_service.db.triggers import create_triggers, drop_triggers
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings
from tests.support.serve import run_holdfast

PROMISED = Path(__file__).with_name("v1.txt")

# Over all that makes the views, on both databases. A catalog has the views of the last revision that it was brought to.
FINGERPRINT = "03eca18dd43f98b6"


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    """Nothing that is done stays."""
    database = Database(database_url)
    with database.engine.connect() as opened:
        yield opened
        opened.rollback()
    database.dispose()


def test_a_catalog_that_was_taken_back_has_its_views_again_after_the_upgrade(database_url: str) -> None:
    database = Database(database_url)
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "-1")
        assert inspect(connection).get_view_names() == []
    upgrade(database)
    assert set(inspect(database.engine).get_view_names()) == {view.name for view in all_views()}
    database.dispose()


def test_a_view_of_a_persons_own_does_not_keep_a_catalog_from_an_upgrade_of_a_table(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite checks every view when it renames a table, and a batch of Alembic's does that."""
    database = Database(database_url)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE VIEW alive AS SELECT run FROM dashboard_v1_runs WHERE status = 'training'")
        connection.exec_driver_sql('CREATE VIEW "on ""top""" AS SELECT count(*) AS runs FROM alive')
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "-1")
    with exclusive_connection(database) as connection:
        drop_views(connection)
        drop_triggers(connection)
        with Operations(MigrationContext.configure(connection)).batch_alter_table("runs", recreate="auto") as batch:
            batch.alter_column("name", type_=Text(), nullable=True)
            batch.alter_column("name", type_=Text(), nullable=False)
        create_triggers(connection)
    upgrade(database)
    assert set(inspect(database.engine).get_view_names()) == {view.name for view in all_views()}
    told = [str(record.msg) for record in caplog.records if "view_on_top_dropped" in str(record.msg)]
    assert len(told) == 2
    assert "= 'training'" in " ".join(told)
    database.dispose()


def test_the_views_of_another_version_go_too(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    database = Database(database_url)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE VIEW dashboard_v2_runs AS SELECT id FROM runs")
        connection.exec_driver_sql("CREATE VIEW dashboard_v1_no_more AS SELECT id FROM dashboard_v2_runs")
        drop_views(connection)
        assert inspect(connection).get_view_names() == []
        create_views(connection)
    assert "dashboard_v1_no_more" in caplog.text
    database.dispose()


def test_commands_that_look_change_no_view(database_url: str) -> None:
    database = Database(database_url)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE VIEW alive AS SELECT run FROM dashboard_v1_runs")
    for look in (command.current, command.check, lambda config: command.upgrade(config, "head")):
        with exclusive_connection(database) as connection:
            look(alembic_config(connection))
    assert "alive" in inspect(database.engine).get_view_names()
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP VIEW alive")
    database.dispose()


def test_a_view_that_was_dropped_comes_back_at_the_next_start(database_url: str) -> None:
    database = Database(database_url)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP VIEW dashboard_v1_runs")
        connection.exec_driver_sql("CREATE VIEW alive AS SELECT run FROM dashboard_v1_attempts")
    open_database(ServiceSettings(database_url=SecretStr(database_url))).dispose()
    assert set(inspect(database.engine).get_view_names()) == {view.name for view in all_views()}
    with database.engine.begin() as connection:
        connection.exec_driver_sql("CREATE VIEW alive AS SELECT run FROM dashboard_v1_attempts")
    ensure_views(database)
    assert "alive" in inspect(database.engine).get_view_names(), "nothing was missing, so nothing was made anew"
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP VIEW alive")
    database.dispose()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_what_an_admin_command_logs_is_not_in_its_output(database_url: str) -> None:
    database = Database(database_url)
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "-1")
        connection.exec_driver_sql("CREATE VIEW alive AS SELECT id FROM runs")
    made = run_holdfast("admin", "create-token", HOLDFAST_DATABASE_URL=database_url)
    assert made.returncode == 0, made.stderr
    assert len(made.stdout.split()) == 1
    assert "view_on_top_dropped" in made.stderr
    database.dispose()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_sqlite_has_no_roles(database_url: str) -> None:
    database = Database(database_url)
    for refused in (put_role, remove_role):
        with pytest.raises(DashboardRoleError, match="Set HOLDFAST_DATABASE_URL to a Postgres"):
            refused(database, "dash")
    database.dispose()


def differences(connection: Connection, views: tuple[View, ...]) -> list[str]:
    """What the catalog's views have otherwise than these say: names, order, and on Postgres types."""
    told = []
    for view in views:
        promised = [(each.name, each.kind.postgres) for each in view.columns]
        if connection.dialect.name == "postgresql":
            found = connection.execute(
                text(
                    "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = :name "
                    "AND table_schema = current_schema() ORDER BY ordinal_position"
                ),
                {"name": view.name},
            )
            there = [tuple(row) for row in found]
        else:
            names = connection.execute(text(f"SELECT * FROM {view.name}")).keys()
            there = [(name, kind) for name, (_, kind) in zip(names, promised, strict=False)]
            there += [(name, "?") for name in list(names)[len(promised) :]]
        told += [
            f"{view.name}: {mine} is {theirs}" for mine, theirs in zip(promised, there, strict=False) if mine != theirs
        ]
        told += [f"{view.name}: {len(there)} columns"] if len(there) != len(promised) else []
    return told


def test_a_catalog_has_the_views_as_they_are_documented(connection: Connection) -> None:
    assert set(inspect(connection).get_view_names()) == {view.name for view in all_views()}
    assert differences(connection, all_views()) == []


def test_a_column_of_another_name_or_type_or_one_more_is_found(connection: Connection) -> None:
    def otherwise(column: Column) -> tuple[View, ...]:
        return tuple(
            replace(view, columns=(*view.columns[:-1], column)) if view.subject == "runs" else view
            for view in all_views()
        )

    last = next(view for view in all_views() if view.subject == "runs").columns[-1]
    assert "purge_time" in " ".join(differences(connection, otherwise(replace(last, name="purge_time"))))
    if connection.dialect.name == "postgresql":
        assert "bigint" in " ".join(differences(connection, otherwise(replace(last, kind=Kind.INTEGER))))
    longer = tuple(replace(view, columns=view.columns[:-1]) for view in all_views())
    assert len(differences(connection, longer)) == len(longer)


def test_a_view_of_a_column_that_the_tables_do_not_have_fails(connection: Connection) -> None:
    dialect = POSTGRES if connection.dialect.name == "postgresql" else SQLITE
    wrong = View("wrong", "A run.", (Column("run", Kind.TEXT, "Its name.", "r.title"),), "FROM runs r")

    def make_and_read() -> None:
        connection.exec_driver_sql(wrong.create_statement(dialect))
        connection.exec_driver_sql(f"SELECT * FROM {wrong.name}")  # SQLite looks only now

    with pytest.raises(DBAPIError, match="title"):
        make_and_read()


def test_v1_keeps_its_columns() -> None:
    promised = PROMISED.read_text(encoding="utf-8").split("\n")[:-1]
    now = [f"{view.subject}.{each.name} {each.kind.postgres}" for view in all_views() for each in view.columns]
    gone = sorted(set(promised) - set(now))
    assert not gone, f"dashboards read {gone}: keep them, and give what is to be another a view of the next version"
    for view in all_views():
        here = [line for line in now if line.startswith(f"{view.subject}.")]
        before = [line for line in promised if line.startswith(f"{view.subject}.")]
        assert here[: len(before)] == before, "columns are added at the end"
    assert now == promised, f"write the new columns into {PROMISED.name}"


def test_a_change_of_the_views_comes_with_a_revision() -> None:
    made = "\n".join(view.create_statement(dialect) for dialect in (POSTGRES, SQLITE) for view in all_views(dialect))
    found = hashlib.sha256(made.encode()).hexdigest()[:16]
    assert found == FINGERPRINT, (
        "The views are made anew by an upgrade alone: add a revision to migrations/versions, an empty one if no table "
        f"changes, and write {found!r} here."
    )


def test_every_column_says_what_it_is_and_in_which_unit() -> None:
    for view in all_views():
        names = [column.name for column in view.columns]
        assert len(set(names)) == len(names)
        for column in view.columns:
            assert column.meaning.endswith("."), (view.name, column.name)
            if column.name.endswith("_bytes"):
                assert (column.kind, column.unit) == (Kind.INTEGER, "bytes")
            if column.name.endswith("_seconds"):
                assert (column.kind, column.unit) == (Kind.NUMBER, "seconds")
            if column.name.endswith("_at"):
                assert column.kind is Kind.MOMENT


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_postgres_tells_what_a_column_is(connection: Connection) -> None:
    told = connection.execute(
        text(
            "SELECT a.attname, col_description(a.attrelid, a.attnum) FROM pg_attribute a "
            "WHERE a.attrelid = 'dashboard_v1_checkpoints'::regclass AND a.attnum > 0"
        )
    )
    checkpoints = next(view for view in all_views() if view.subject == "checkpoints")
    assert dict(told.all()) == {column.name: meaning_of(column) for column in checkpoints.columns}
    assert "In bytes." in meaning_of(next(each for each in checkpoints.columns if each.name == "logical_bytes"))


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_view_that_people_have_made_on_top_does_not_keep_a_catalog_from_its_upgrade(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    connection.exec_driver_sql("CREATE VIEW alive AS SELECT run FROM dashboard_v1_runs WHERE status = 'training'")
    connection.exec_driver_sql("CREATE VIEW more AS SELECT count(*) FROM alive")
    drop_views(connection)
    create_views(connection)
    assert set(inspect(connection).get_view_names()) == {view.name for view in all_views()}
    told: Any = [record.msg for record in caplog.records if "view_on_top_dropped" in str(record.msg)]
    assert len(told) == 2
    assert "= 'training'" in " ".join(map(str, told))
