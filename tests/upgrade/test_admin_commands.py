"""`holdfast admin migrate`, `backup` and `restore` as an operator runs them; a fleet leaves migrations to that."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from alembic import command
from sqlalchemy import text

from holdfast_service.db.engine import Database
from holdfast_service.db.migrate import alembic_config, exclusive_connection
from holdfast_service.service import open_database
from holdfast_service.settings import ServiceSettings, SettingsError
from tests.support.serve import run_holdfast
from tests.support.service import running_service

Holdfast = Callable[..., CompletedProcess[str]]


@pytest.fixture
def holdfast(settings: ServiceSettings) -> Holdfast:
    def run(*arguments: str, **more: str) -> CompletedProcess[str]:
        return run_holdfast(
            *arguments,
            **({"HOLDFAST_DATABASE_URL": settings.database_url_text, "HOLDFAST_DATA_DIR": "/nowhere"} | more),
        )

    return run


def take_back(settings: ServiceSettings, revision: str = "-1") -> None:
    database = Database(settings.database_url_text)
    with exclusive_connection(database) as connection:
        command.downgrade(alembic_config(connection), revision)
    database.dispose()


def test_migrate_says_what_it_would_do_and_does_it(settings: ServiceSettings, holdfast: Holdfast) -> None:
    up_to_date = holdfast("admin", "migrate", "--check")
    assert (up_to_date.returncode, up_to_date.stdout) == (0, "The catalog is up to date; there is nothing to do.\n")
    take_back(settings)
    said = holdfast("admin", "migrate", "--check")
    assert said.returncode == 1, said.stderr
    assert said.stdout.startswith("to do  0")
    done = holdfast("admin", "migrate")
    assert done.returncode == 0, done.stderr
    assert done.stdout == said.stdout.replace("to do", "done ").replace("done   ", "done  ")
    assert holdfast("admin", "migrate").stdout == up_to_date.stdout


def test_a_fleets_service_leaves_migrations_to_the_operator(settings: ServiceSettings, holdfast: Holdfast) -> None:
    fleet = settings.model_copy(update={"migrate_at_start": False})
    open_database(fleet).dispose()
    take_back(settings)
    with pytest.raises(SettingsError, match=r"lacks 1 revisions.*holdfast admin migrate"):
        open_database(fleet)
    refused = holdfast("serve", HOLDFAST_MIGRATE_AT_START="false")
    assert refused.returncode == 2
    assert "Run `holdfast admin migrate` of this version" in refused.stderr
    assert holdfast("admin", "migrate").returncode == 0
    open_database(fleet).dispose()


def test_a_catalog_that_is_too_new_is_refused_by_name(settings: ServiceSettings, holdfast: Holdfast) -> None:
    open_database(settings).dispose()
    database = Database(settings.database_url_text)
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.dispose()
    for arguments in (("admin", "migrate"), ("admin", "migrate", "--check")):
        refused = holdfast(*arguments)
        assert refused.returncode == 1
        assert "at revision 9999, which this version of Holdfast does not know" in refused.stderr


def test_a_backup_and_its_restore_by_command(settings: ServiceSettings, holdfast: Holdfast, tmp_path: Path) -> None:
    file, data = tmp_path / "catalog.backup", tmp_path / "another"
    with running_service(settings) as service:
        catalog_id = service.context.catalog_id
    made = holdfast("admin", "backup", str(file))
    assert made.returncode == 0, made.stderr
    assert f"the catalog {catalog_id}" in made.stdout
    full = holdfast("admin", "restore", str(file))
    assert full.returncode == 1
    assert "there already" in full.stderr or "has tables" in full.stderr
    if settings.database_url_text.startswith("sqlite"):
        restored = run_holdfast("admin", "restore", str(file), "--data-dir", str(data))
        assert restored.returncode == 0, restored.stderr
        assert "at epoch 2" in restored.stdout
        assert (data / "catalog.db").stat().st_mode & 0o077 == 0


def test_a_command_for_a_catalog_that_is_not_there_says_so_and_makes_none(
    settings: ServiceSettings, holdfast: Holdfast, tmp_path: Path
) -> None:
    """As in a shell that lacks the service's environment."""
    file, nowhere = tmp_path / "catalog.backup", tmp_path / "nowhere" / "catalog.db"
    key = {"HOLDFAST_SECRETS_KEY": base64.b64encode(secrets.token_bytes(32)).decode()}
    for url in (f"sqlite:///{nowhere}", settings.database_url_text):
        for command_line in (["rotate-secrets"], ["raise-epoch"], ["confirm-move"], ["backup", str(file)]):
            refused = holdfast("admin", *command_line, **key, HOLDFAST_DATABASE_URL=url)
            assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
            assert "There is no catalog in this database, or it was never served" in refused.stderr
    refused = run_holdfast("admin", "raise-epoch", "--data-dir", str(nowhere.parent))
    assert refused.returncode == 2
    assert not nowhere.parent.exists()
    assert not file.exists()
