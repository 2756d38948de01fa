"""/metrics: this process's requests, and the catalog's own numbers."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import event, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import Health, Scope
from holdfast_service.db import cached_read
from holdfast_service.db.tables.core import Checkpoint, Store
from holdfast_service.insights import metrics as run_numbers
from holdfast_service.runs import metrics as catalog_numbers
from holdfast_service.usage import metrics as byte_numbers
from tests.service.conftest import Clock
from tests.support.rank import Job
from tests.support.service import RunningService


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_read, "LONGEST_SECONDS", 0.0)


def scraper(service: RunningService) -> httpx.Client:
    return service.http(token=service.token(Scope.METRICS))


def scrape(service: RunningService, http: httpx.Client | None = None) -> dict[tuple[str, tuple[str, ...]], float]:
    """Value by name and label values in the order of the labels' names."""
    text = (http or scraper(service)).get("/metrics").text
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_catalogs_numbers_are_told(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    job.save(100, content=b"x" * 1000)
    job.save(200, content=b"x" * 1000)
    job.begin(300).abort()
    job.begin(400)
    clock.advance(300)
    seen = scrape(service)
    assert seen["holdfast_catalog_up", ()] == 1
    assert seen["holdfast_checkpoints_total", ("committed", "demo")] == 2
    assert seen["holdfast_checkpoints_total", ("aborted", "demo")] == 1
    assert seen["holdfast_checkpoints_uploading", ("demo",)] == 1
    assert seen["holdfast_checkpoint_bytes_total", ("negotiated", "demo")] == 2 * 2006
    assert seen["holdfast_checkpoint_bytes_total", ("uploaded", "demo")] == 2006
    assert seen["holdfast_checkpoint_bytes_total", ("deduplicated", "demo")] == 2006
    assert seen["holdfast_stored_bytes", ("demo",)] == 2006
    assert 300 <= seen["holdfast_restore_point_age_seconds", ("demo", "gpt")] < 330
    job.end()
    assert ("holdfast_restore_point_age_seconds", ("demo", "gpt")) not in scrape(service)


def test_a_live_run_is_told_with_its_hosts(
    service: RunningService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(service.http(), host="node-3", environment={"hosts": "login,node-[3-5]"})
    lone = Job(service.http(), "demo/lone")
    clock.advance(600)
    job.heartbeat(120, steps_run=120, progress_age_seconds=0.0, steps_per_second=2.5)
    job.save(100)
    seen = scrape(service)
    run = ("demo", "gpt")
    assert 600 <= seen["holdfast_attempt_age_seconds", run] < 630
    assert seen["holdfast_attempt_number", run] == 1
    assert seen["holdfast_attempt_step", run] == 120
    assert seen["holdfast_attempt_steps_per_second", run] == 2.5
    assert seen["holdfast_attempt_stalled", run] == 0
    assert seen["holdfast_restore_point_step", run] == 100
    of_lone = {name for name, labels in seen if labels == ("demo", "lone")}
    assert of_lone == {"holdfast_attempt_age_seconds", "holdfast_attempt_number", "holdfast_attempt_stalled"}
    assert hosts_told(service) == {"node-3", "login", "node-4", "node-5"}
    monkeypatch.setattr(catalog_numbers, "MOST_HOSTS_TOLD", 2)
    assert hosts_told(service) == {"node-3", "login"}
    job.end()
    lone.end()
    assert not any(name.startswith(("holdfast_attempt_", "holdfast_restore_")) for name, _ in scrape(service))


def test_a_store_that_cannot_be_used_is_told(service: RunningService) -> None:
    assert scrape(service)["holdfast_store_unavailable", ("primary",)] == 0
    with service.context.database.transaction() as session:
        session.execute(update(Store).values(unavailable_as="primary"))
    assert scrape(service)["holdfast_store_unavailable", ("primary",)] == 1


def hosts_told(service: RunningService) -> set[str]:
    return {labels[0] for name, labels in scrape(service) if name == "holdfast_attempt_host_info"}


def test_a_quota_and_corrupt_checkpoints_are_told_by_project(service: RunningService) -> None:
    service.make_project("demo", quota_bytes=5000)
    saved = Job(service.http()).save(100, content=b"x" * 1000)
    Job(service.http(), "other/gpt").save(100)
    with service.context.database.transaction() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == saved["id"]).values(health=Health.CORRUPT))
    seen = scrape(service)
    assert {labels: value for (name, labels), value in seen.items() if name == "holdfast_quota_bytes"} == {
        ("demo",): 5000
    }
    assert seen["holdfast_quota_used_bytes", ("demo",)] == 2006
    assert seen["holdfast_checkpoints_corrupt", ("demo",)] == 1
    assert seen["holdfast_checkpoints_corrupt", ("other",)] == 0


@pytest.mark.rule("limits-before-work")
def test_requests_are_counted_by_route_and_not_by_path(service: RunningService) -> None:
    Job(service.http()).save(100)
    service.http().get("/v1/checkpoints/ck_unknown")
    service.http().get("/no/such/path")
    for method in ("FROBNICATE", "get", "LOCK"):
        service.http(token=None).request(method, "/v1/projects")
    seen = scrape(service)
    assert seen["holdfast_requests_total", ("POST", "/v1/projects/{project}/runs/{run}/checkpoints", "201")] == 1
    assert seen["holdfast_requests_total", ("GET", "/v1/checkpoints/{checkpoint_id}", "404")] == 1
    assert seen["holdfast_requests_total", ("GET", "unknown", "404")] == 1
    assert {labels[0] for name, labels in seen if name == "holdfast_requests_total"} == {"GET", "POST", "PUT", "other"}
    assert not any("ck_" in label for _, labels in seen for label in labels)


@pytest.mark.rule("limits-before-work")
def test_metrics_are_for_tokens_that_read_nothing_else(service: RunningService) -> None:
    service.make_project("demo")
    job = Job(service.http())
    saved = job.save(1)
    http = scraper(service)
    assert http.get("/metrics").status_code == 200
    attempts = f"{job.base}/attempts"
    for path in ("/v1/projects", attempts, f"{attempts}/1", f"{attempts}/1/config", f"/v1/checkpoints/{saved['id']}"):
        assert http.get(path).json()["code"] == "forbidden", path
    assert http.post("/v1/mount-proofs").json()["code"] == "forbidden"
    for token, status in (
        (None, 401),
        (service.token(Scope.READ), 403),
        (service.token(Scope.METRICS, project="demo"), 403),
    ):
        assert service.http(token=token).get("/metrics").status_code == status


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)  # SQLite reads one snapshot
def test_a_project_that_is_made_while_the_numbers_are_read_fails_no_scrape(service: RunningService) -> None:
    context = service.context
    readers: dict[str, Callable[[Session], object]] = {
        "runs": run_numbers._read,
        "checkpoints": lambda session: catalog_numbers._read(session, context),
        "bytes": lambda session: byte_numbers._count(session, context),
    }
    for name, read in readers.items():
        statements = 0

        def make_after_the_first(_: object, name: str = name) -> None:
            nonlocal statements
            statements += 1
            if statements == 2:
                Job(service.http(), f"{name}/gpt").save(1)

        with context.database.read() as session:
            event.listen(session, "do_orm_execute", make_after_the_first)
            read(session)
        assert statements > 2


def test_a_database_that_is_unavailable_leaves_the_process_its_own_metrics(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast_protocol.problems import ProblemCode
    from holdfast_service.errors import ProblemError

    service.http().get("/v1/service")
    http, stranger = scraper(service), scraper(service)
    scrape(service, http)

    def unavailable(**_: bool) -> None:
        raise ProblemError(ProblemCode.DATABASE_UNAVAILABLE, "It is away.")

    monkeypatch.setattr(service.context.database, "read", unavailable)
    seen = scrape(service, http)
    assert stranger.get("/metrics").status_code == 503
    assert seen["holdfast_catalog_up", ()] == 0
    assert seen["holdfast_requests_total", ("GET", "/v1/service", "200")] == 1
