"""JSON and URLs can spell what no database keeps. It is refused, and never poisons what others read."""

from __future__ import annotations

import json

import httpx
import pytest

from holdfast_service.db.pages import encode_cursor
from tests.support.rank import Job, Refused
from tests.support.service import RunningService

HUGE = 10**30


@pytest.fixture
def http(service: RunningService) -> httpx.Client:
    service.make_project("demo")
    return service.http()


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800"])
def test_text_that_cannot_be_kept_is_refused_before_it_poisons_the_run(http: httpx.Client, text: str) -> None:
    attempts = "/v1/projects/demo/runs/gpt/attempts"
    for field in (f'"environment": {{"k": "{text}"}}', f'"environment": {{"{text}": "v"}}', f'"host": "{text}"'):
        body = f'{{"launch_id": "l", "after": 0, "world_size": 1, {field}}}'
        assert http.post(attempts, content=body, headers={"Content-Type": "application/json"}).status_code == 422
    job = Job(http)
    save = job.begin(1)
    for path, field in ((f"/v1/checkpoints/{save.id}/abort", "reason"), (f"{job.base}/attempts/1/end", "detail")):
        body = json.dumps({**job.fence, "outcome": "failed"} if field == "detail" else job.fence)
        reply = http.post(
            path, content=f'{body[:-1]}, "{field}": "{text}"}}', headers={"Content-Type": "application/json"}
        )
        assert reply.status_code == 422
    assert http.get(attempts).status_code == 200


def test_numbers_that_cannot_be_kept_are_refused_and_are_no_bug(http: httpx.Client) -> None:
    job = Job(http)
    save = job.begin(1)
    with pytest.raises(Refused) as refused:
        job.call("POST", f"{job.base}/attempts/1/heartbeat", step=HUGE)
    assert refused.value.status == 422
    assert http.put("/v1/projects/demo", json={"quota_bytes": HUGE}).status_code == 422
    for path in (
        f"{job.base}/attempts/{HUGE}",
        f"{job.base}/checkpoints?attempt={HUGE}",
        f"{job.base}/checkpoints/1%23{HUGE}",
        f"{job.base}/checkpoints/{HUGE}",
        f"/v1/checkpoints/{save.id}/shards/{HUGE}",
    ):
        assert http.get(path).status_code in (404, 409, 422), path


def test_nul_in_a_path_is_refused_or_not_found(http: httpx.Client) -> None:
    Job(http)
    for path in (
        "/v1/projects/%00",
        "/v1/projects/demo/runs/a%00b",
        "/v1/projects/demo/runs/a%00b/attempts",
        "/v1/checkpoints/%00",
        "/v1/projects/demo/runs/gpt/checkpoints/best:%00",
    ):
        assert http.get(path).status_code in (404, 409, 422), path


@pytest.mark.parametrize("text", ["\x00", "\ud800"])
def test_a_cursor_of_such_text_is_refused_and_is_no_bug(http: httpx.Client, text: str) -> None:
    reply = http.get("/v1/projects", params={"cursor": encode_cursor("projects", text)})
    assert reply.json()["code"] == "invalid_request"
