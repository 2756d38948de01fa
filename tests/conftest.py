"""Servers that the tests share: each is started when the first test asks for it, once per test process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.databases import PostgresCatalogs, SqliteCatalogs
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.seaweedfs import SeaweedFS, seaweedfs_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedFS]:
    with seaweedfs_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_catalogs(postgres: PostgresServer) -> Iterator[PostgresCatalogs]:
    catalogs = PostgresCatalogs(postgres)
    yield catalogs
    catalogs.drop()


@pytest.fixture(scope="session")
def sqlite_catalogs(tmp_path_factory: pytest.TempPathFactory) -> SqliteCatalogs:
    return SqliteCatalogs(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's shell has set must not decide a test."""
    import os

    for name in list(os.environ):
        if name.startswith("HOLDFAST_"):
            monkeypatch.delenv(name)
