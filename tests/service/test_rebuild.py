"""A catalog from the bucket alone, and what keeps it possible: the records beside the data (rules 5 and 30)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_service.settings import ServiceSettings
from tests.support.databases import PostgresCatalogs
from tests.support.rank import Job, Refused
from tests.support.rebuilt import read_all, rebuilt_service, record_all
from tests.support.service import RunningService


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


def latest(service: RunningService, run: str = "demo/gpt") -> int | None:
    project, _, name = run.partition("/")
    point = service.http().get(f"/v1/projects/{project}/runs/{name}/restore-point").json()["restore_point"]
    return None if point is None else point["step"]


@pytest.mark.rule("protocol-30")
def test_after_the_database_is_lost_everything_is_back_from_the_bucket(
    service: RunningService, settings: ServiceSettings, empty_url: str
) -> None:
    http = service.http()
    first = Job(http, world_size=2)
    first.save(500)
    first.save(1000)
    second = Job(http, after=1, world_size=2)
    five_hundred = http.get("/v1/projects/demo/runs/gpt/checkpoints").json()["items"][-1]
    assert five_hundred["step"] == 500
    second.resumed_from(five_hundred["id"], rollback=True)
    saved = second.save(550, metrics={"loss": {"value": 0.25}})
    http.patch(
        f"/v1/checkpoints/{saved['id']}", json={"labels": ["milestone"]}, headers={"If-Match": "*"}
    ).raise_for_status()
    record_all(service.context)
    before = http.get(f"/v1/checkpoints/{saved['id']}").json()
    assert latest(service) == 550

    with rebuilt_service(settings, empty_url) as (again, report):
        assert report.whole, report.lines()
        assert (report.projects, report.runs, report.attempts) == (1, 1, 2)
        assert latest(again) == 550, "1000 was rolled back and must not outrank it"
        http = again.http()
        after = http.get(f"/v1/checkpoints/{saved['id']}").json()
        assert {**after, "etag": None} == {**before, "etag": None}
        for rank in range(2):
            data = f"demo/gpt 2 550 {rank}".encode()
            assert read_all(http, saved["id"], [data, b"index " + data])
        with pytest.raises(Refused) as refused:
            Job.call(second_at(second, http), "POST", f"{second.base}/checkpoints", step=600, world_size=2)
        assert refused.value.code == "stale_attempt", "a job of before the loss must not write any more"
        third = Job(http, after=2, world_size=2)
        assert third.number == 3
        assert third.opened["restore_point"]["step"] == 550


def second_at(job: Job, http: object) -> Job:
    job.http = http  # type: ignore[assignment]
    return job
