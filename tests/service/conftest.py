"""A fresh catalog and a running service for each test, on both databases.

database_url   parametrised: sqlite, postgres
service        the application with a posix store, called in this process (tests/support/service.py)
s3_service     the same with SeaweedFS
clock          moves the catalog's clock: clock.advance(seconds)
cold           a service with something cold (tests/support/tiers.py): a second folder beside SQLite, a bucket with
               archive classes beside Postgres; override `kind` for the other
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import holdfast_service.db.dialect
from holdfast_service.settings import ServiceSettings
from tests.support.databases import PostgresCatalogs
from tests.support.s3_fake.server import S3Fake, s3_fake
from tests.support.seaweedfs import SeaweedFS
from tests.support.service import RunningService, running_service
from tests.support.tiers import READ_LEASE_SECONDS, Cold


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated, empty catalog of its own."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_catalogs").new(tmp_path)
        return
    catalogs: PostgresCatalogs = request.getfixturevalue("postgres_catalogs")
    url = catalogs.new()
    yield url
    catalogs.give_back(url)


@pytest.fixture
def empty_url(database_url: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Another empty catalog, on the same kind of database as the test's own."""
    if database_url.startswith("sqlite"):
        yield request.getfixturevalue("sqlite_catalogs").new(tmp_path)
        return
    catalogs: PostgresCatalogs = request.getfixturevalue("postgres_catalogs")
    url = catalogs.new()
    yield url
    catalogs.give_back(url)


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> ServiceSettings:
    """Override this fixture to test another setting."""
    return ServiceSettings(
        database_url=database_url, store=f"posix://{tmp_path / 'store'}", data_dir=tmp_path / "data", port=0
    )


@pytest.fixture
def service(settings: ServiceSettings) -> Iterator[RunningService]:
    with running_service(settings) as running:
        yield running


@pytest.fixture
def s3_service(
    settings: ServiceSettings, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningService]:
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    store = seaweedfs.store_url_for(f"test-{secrets.token_hex(6)}")
    with running_service(settings.model_copy(update={"store": store})) as running:
        yield running


class Clock:
    """The catalog's clock, as far ahead of the database's as the test has moved it."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def advance(self, seconds: float) -> None:
        self.ahead += timedelta(seconds=seconds)

    def let_tickets_expire(self, settings: ServiceSettings) -> None:
        """Until no PUT can land any more that somebody was allowed."""
        self.advance(settings.ticket_seconds + settings.longest_upload_seconds + 1)


@pytest.fixture
def kind(database_url: str) -> str:
    return "folder" if database_url.startswith("sqlite") else "bucket"


@pytest.fixture
def cold(
    kind: str, settings: ServiceSettings, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cold]:
    with ExitStack() as stack:
        fake: S3Fake | None = None
        changes: dict[str, Any] = {"read_lease_seconds": READ_LEASE_SECONDS}
        if kind == "bucket":
            fake = stack.enter_context(s3_fake())
            for name, value in fake.environment.items():
                monkeypatch.setenv(name, value)
            changes["store"] = fake.store_url_for("checkpoints")
        else:
            changes["cold_store"] = f"posix://{tmp_path / 'cold'}"
        service = stack.enter_context(running_service(settings.model_copy(update=changes)))
        yield Cold(service, clock.advance, fake)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    real: Callable[..., datetime] = holdfast_service.db.dialect._read_clock
    moved = Clock()
    monkeypatch.setattr(holdfast_service.db.dialect, "_read_clock", lambda *read: real(*read) + moved.ahead)
    return moved
