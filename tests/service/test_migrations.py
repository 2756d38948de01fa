"""The revisions: the same tables as the code says on both databases, back and forth, and two starts at once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import inspect, text

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


def test_the_newest_revision_can_be_taken_back_and_put_on_again(database: Database) -> None:
    upgrade(database)
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), "-1")
        assert pending_revision(connection) is not None
    upgrade(database)
    assert tables(database) == set(Table.metadata.tables)


def test_services_that_start_at_once_migrate_once(database: Database) -> None:
    with ThreadPoolExecutor(4) as starts:
        assert list(starts.map(lambda _: upgrade(database), range(4))) == [None] * 4
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
    with pytest.raises(CatalogTooNewError, match="9999"):
        upgrade(database)


def test_the_revisions_are_found_in_a_checkout_and_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (migrations_folder() / "env.py").is_file()
    package = tmp_path / "site-packages" / "holdfast_service"
    (package / "migrations").mkdir(parents=True)
    monkeypatch.setattr(holdfast_service.db.migrate, "__file__", str(package / "db" / "migrate.py"))
    assert migrations_folder() == package / "migrations"
