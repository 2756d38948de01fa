"""A token with limits of its own, and a project with a rate, over HTTP. What the limits are made of:
tests/unit/test_token_limits.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import new_token_text
from holdfast_service.auth.tokens import insert_token
from holdfast_service.settings import ServiceSettings
from tests.support.rank import Job, answer
from tests.support.service import RunningService, running_service

pytestmark = pytest.mark.rule("limits-before-work")
PARTS = [b"weights", b"index"]
SELDOM = 0.01
"""One call, and the next after 100 s."""


def limited(service: RunningService, http: httpx.Client | None = None, **limits: Any) -> Any:
    body = {"name": "limited", "scopes": [scope.value for scope in Scope], **limits}
    return answer((http or service.http()).post("/v1/tokens", json=body))


def told(reply: httpx.Response) -> tuple[str | None, ...]:
    return tuple(reply.headers.get(f"RateLimit-{name}") for name in ("Limit", "Remaining", "Reset"))


def test_a_token_calls_no_more_often_than_it_may_and_seals_and_heartbeats_do_not_count(service: RunningService) -> None:
    job = Job(service.http())
    save = job.begin(1)
    save.upload(0, PARTS)
    slow = service.http(token=limited(service, requests_per_second=SELDOM)["token"])
    first = slow.get("/v1/projects")
    assert (first.status_code, *told(first)) == (200, "1", "0", "100")
    again = slow.get("/v1/projects")
    assert (again.status_code, again.json()["code"], again.json()["retryable"]) == (429, "rate_limited", True)
    assert told(again)[:2] == ("1", "0")
    assert 1 <= int(again.headers["Retry-After"]) <= 30
    assert "HOLDFAST_TOKEN_REQUESTS_PER_SECOND" in again.json()["detail"]
    refused = {"class": "other", "project": "(no project)", "limit": "HOLDFAST_TOKEN_REQUESTS_PER_SECOND"}
    assert service.app.state.metrics.get_sample_value("holdfast_calls_refused_total", refused) == 1
    job.http = slow
    assert job.heartbeat(1)
    assert save.seal(0, PARTS)["state"] == "committed"
    assert slow.get("/v1/projects").status_code == 429
    other = service.http().get("/v1/projects")
    assert (other.status_code, *told(other)) == (200, None, None, None)


def test_the_settings_limit_each_token_that_has_no_limit_of_its_own(tmp_path: Path) -> None:
    settings = ServiceSettings(data_dir=tmp_path / "data", port=0, token_requests_per_second=SELDOM)
    with running_service(settings) as service:
        own = service.http(token=limited(service, requests_per_second=1000)["token"])
        for token in (service.token(), service.token()):
            http = service.http(token=token)
            assert [http.get("/v1/projects").status_code for _ in range(3)] == [200, 429, 429]
        assert {own.get("/v1/projects").status_code for _ in range(20)} == {200}


def test_a_project_calls_no_more_often_than_it_may_and_seals_and_heartbeats_do_not_count(tmp_path: Path) -> None:
    settings = ServiceSettings(
        data_dir=tmp_path / "data", port=0, project_requests_per_second=SELDOM, token_burst_seconds=8 / SELDOM
    )
    with running_service(settings) as service:
        job = Job(service.http())  # one call
        save = job.begin(1)  # one
        save.upload(0, PARTS)  # two
        first, second = (service.http(token=service.token(Scope.READ, project="demo")) for _ in range(2))
        again = first.get("/v1/projects")
        assert (again.status_code, again.json()["code"], again.json()["retryable"]) == (429, "rate_limited", True)
        assert told(again)[:2] == ("4", "0")
        assert 1 <= int(again.headers["Retry-After"]) <= 30
        assert "HOLDFAST_PROJECT_REQUESTS_PER_SECOND" in again.json()["detail"]
        refused = {"class": "other", "project": "demo", "limit": "HOLDFAST_PROJECT_REQUESTS_PER_SECOND"}
        assert service.app.state.metrics.get_sample_value("holdfast_calls_refused_total", refused) == 1
        for _ in range(10):
            assert job.heartbeat(1)
        assert save.seal(0, PARTS)["state"] == "committed"
        points = [http.get("/v1/projects/demo/runs/gpt/restore-point") for http in (first, second) * 3]
        assert [each.status_code for each in points] == [200] * 4 + [429] * 2, "what jobs need has the other half"
        assert told(points[0])[:2] == ("8", "3")
        service.make_project("other")
        with service.http(token=service.token(Scope.READ, project="other")) as other:
            assert told(other.get("/v1/projects"))[:2] == ("4", "2"), "it was made by one call"
        assert told(service.http().get("/v1/projects")) == (None, None, None), "of no project"


def test_the_reply_tells_of_the_rate_that_has_less_left(tmp_path: Path) -> None:
    settings = ServiceSettings(
        data_dir=tmp_path / "data", port=0, project_requests_per_second=4 * SELDOM, token_burst_seconds=1 / SELDOM
    )
    with running_service(settings) as service:
        service.make_project("demo")
        narrow, wide = (limited(service, project="demo", requests_per_second=each * SELDOM)["token"] for each in (1, 3))
        assert told(service.http(token=narrow).get("/v1/projects"))[:2] == ("1", "0")
        refused = service.http(token=narrow).get("/v1/projects")
        assert (refused.status_code, "HOLDFAST_TOKEN_REQUESTS_PER_SECOND" in refused.json()["detail"]) == (429, True)
        assert told(service.http(token=wide).get("/v1/projects"))[:2] == ("2", "0"), "the refused one took none"


def test_an_identity_gets_no_more_calls_by_another_exchange(tmp_path: Path) -> None:
    def exchanged(subject: str) -> str:
        text = new_token_text()
        with service.context.database.transaction() as session:
            insert_token(
                session,
                text,
                name="ci: a job",
                scopes=tuple(Scope),
                project_id=None,
                expires_at=None,
                issuer="https://ci.example.com",
                subject=subject,
            )
        return text

    settings = ServiceSettings(data_dir=tmp_path / "data", port=0, token_requests_per_second=SELDOM)
    with running_service(settings) as service:
        tokens = [exchanged("one"), exchanged("one"), exchanged("another")]
        replies = [service.http(token=token).get("/v1/projects").status_code for token in tokens]
        assert replies == [200, 429, 200]


def test_a_limit_that_is_none_is_refused(service: RunningService) -> None:
    for wrong in ({"requests_per_second": 0}, {"requests_per_second": 1e-300}, {"concurrent_requests": 3}):
        reply = service.http().post("/v1/tokens", json={"name": "wrong", "scopes": ["read"], **wrong})
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


def test_a_token_makes_none_with_more_than_its_own_limits(service: RunningService) -> None:
    made = limited(service, requests_per_second=100, concurrent_requests=50)
    assert (made["requests_per_second"], made["concurrent_requests"]) == (100, 50)
    maker = service.http(token=made["token"])
    inherited = limited(service, maker)
    assert (inherited["requests_per_second"], inherited["concurrent_requests"]) == (100, 50)
    less = limited(service, maker, requests_per_second=0.5)
    assert (less["requests_per_second"], less["concurrent_requests"]) == (0.5, 50)
    for more in ({"requests_per_second": 100.5}, {"concurrent_requests": 51}):
        reply = maker.post("/v1/tokens", json={"name": "more", "scopes": ["read"], **more})
        assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
    (shown,) = [one for one in answer(maker.get("/v1/tokens"))["items"] if one["id"] == less["id"]]
    assert shown["requests_per_second"] == 0.5
    (event,) = answer(service.http().get("/v1/audit-events", params={"action": "token.create", "limit": 1}))["items"]
    assert event["after"]["requests_per_second"] == 0.5
