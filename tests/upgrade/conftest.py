"""A catalog of each kind, and a service's settings for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_service.settings import ServiceSettings


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Migrated and empty. On Postgres it is not given back: a test may leave other tables."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_catalogs").new(tmp_path)
        return
    yield request.getfixturevalue("postgres_catalogs").new()


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(
        database_url=database_url, store=f"posix://{tmp_path / 'store'}", data_dir=tmp_path / "data", port=0
    )
