"""The service signs by its own clock, and the store judges by another: how far apart they are, doctor says."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast_client import Client, ClientSettings
from holdfast_client.cli.doctor import Verdict, check_ready, check_store_clocks
from holdfast_protocol.states import Scope
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreUnavailable
from tests.support.rank import answer
from tests.support.s3_fake.server import S3Fake, s3_fake
from tests.support.service import RunningService, running_service


@pytest.fixture(params=["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url: str = request.getfixturevalue("sqlite_catalogs").new(tmp_path)
    return url


@pytest.fixture
def bucket() -> Iterator[S3Fake]:
    with s3_fake() as fake:
        yield fake


@pytest.fixture
def on_bucket(bucket: S3Fake, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningService]:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    with running_service(settings.model_copy(update={"store": bucket.store_url_for("checkpoints")})) as running:
        yield running


def findings(service: RunningService) -> list[tuple[Verdict, str]]:
    token = service.token(Scope.READ)
    with Client(ClientSettings(url=service.url, token=token, retry_seconds=0)) as client:
        return [(found.verdict, found.detail) for found in check_store_clocks(client)]


def clock(service: RunningService) -> dict[str, Any]:
    (only,) = answer(service.http().get("/v1/store-clocks"))["items"]
    found: dict[str, Any] = only
    return found


@pytest.mark.parametrize(
    ("skew", "verdict"),
    [
        (0, Verdict.OK),
        (-50, Verdict.OK),
        (120, Verdict.WARNING),
        (-120, Verdict.WARNING),
        (1200, Verdict.FAILED),
        (-1200, Verdict.FAILED),
    ],
)
def test_a_buckets_clock_is_judged_by_what_its_signatures_tolerate(
    on_bucket: RunningService, bucket: S3Fake, skew: int, verdict: Verdict
) -> None:
    bucket.skew = timedelta(seconds=skew)
    assert clock(on_bucket)["ahead_seconds"] == pytest.approx(skew, abs=30)
    [(found, told)] = findings(on_bucket)
    assert found is verdict, told
    if verdict is Verdict.FAILED:
        assert "refuses every signed URL" in told
        [store] = [one for one in answer_of_readyz(on_bucket) if one["name"] == "store"]
        assert not store["ok"]
        assert "refuses what the service signs: by its clock it is " in store["detail"]
        assert "check credentials" not in store["detail"]


def answer_of_readyz(service: RunningService) -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = service.http().get("/readyz").json()["checks"]
    return checks


def test_by_a_store_that_is_ahead_a_short_ticket_ends_before_it_begins(
    bucket: S3Fake, settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    short = settings.model_copy(update={"store": bucket.store_url_for("checkpoints"), "ticket_seconds": 100})
    with running_service(short) as service:
        bucket.skew = timedelta(seconds=200)
        assert [found for found, _ in findings(service)] == [Verdict.FAILED]
        bucket.skew = timedelta(seconds=-200)
        assert [found for found, _ in findings(service)] == [Verdict.WARNING]


def test_a_filesystem_of_another_time_only_warns(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found for found, _ in findings(service)] == [Verdict.OK]
    store = service.context.store
    monkeypatch.setattr(store, "clock", lambda: datetime.now(UTC) - timedelta(hours=2))
    [(found, told)] = findings(service)
    assert found is Verdict.WARNING
    assert "behind the service's" in told


def test_a_store_that_is_unavailable_has_no_clock(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> datetime:
        raise StoreUnavailable("the store does not answer")

    monkeypatch.setattr(service.context.store, "clock", unavailable)
    assert findings(service) == [(Verdict.SKIPPED, "primary store: the store does not answer")]


def test_doctor_names_the_command_that_shows_what_it_warns_of(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    readiness = service.http().get("/readyz").json()
    assert (readiness["warnings"], readiness["weaknesses"]) == ([], [])
    monkeypatch.setattr("holdfast_service.web.health.weaknesses_of", lambda _: ["HOLDFAST_STORE: It compares none."])
    monkeypatch.setattr("holdfast_service.web.health.what_differs", lambda *_: ["Another process has another store."])
    with Client(ClientSettings(url=service.url, token=service.token(Scope.READ), retry_seconds=0)) as client:
        warned = {found.detail: found.remedy for found in check_ready(client) if found.verdict is Verdict.WARNING}
    assert "`holdfast stores list`" in warned["HOLDFAST_STORE: It compares none."]
    assert "`holdfast workers list`" in warned["Another process has another store."]
