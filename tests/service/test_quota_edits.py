"""Who changes a quota, and from what: it bounds a project, so its own tokens do not move it."""

from __future__ import annotations

import httpx
import pytest

from holdfast_protocol.states import Scope
from tests.support.rank import answer
from tests.support.service import RunningService

pytestmark = pytest.mark.rule("limits-before-work")
PATH = "/v1/projects/demo"


@pytest.fixture
def http(service: RunningService) -> httpx.Client:
    service.make_project("demo", quota_bytes=1000)
    return service.http()


def refused(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


def test_what_is_left_out_stays(http: httpx.Client) -> None:
    assert answer(http.put(PATH, json={}))["quota_bytes"] == 1000


def test_a_quota_changes_only_from_the_one_that_was_seen(http: httpx.Client) -> None:
    seen = http.get(PATH)
    etag = seen.headers["ETag"]
    assert seen.json()["etag"] == etag
    assert refused(http.put(PATH, json={"quota_bytes": 5})) == (428, "edit_needs_version")
    assert refused(http.put(PATH, json={"quota_bytes": None})) == (428, "edit_needs_version")
    assert answer(http.put(PATH, json={"quota_bytes": 5}, headers={"If-Match": etag}))["quota_bytes"] == 5
    assert refused(http.put(PATH, json={"quota_bytes": 6}, headers={"If-Match": etag})) == (412, "edit_conflict")
    assert answer(http.put(PATH, json={"quota_bytes": 5}, headers={"If-Match": etag}))["quota_bytes"] == 5  # said twice
    assert answer(http.put(PATH, json={"quota_bytes": None}, headers={"If-Match": "*"}))["quota_bytes"] is None


def test_a_projects_own_token_does_not_change_what_bounds_it(service: RunningService, http: httpx.Client) -> None:
    own = service.http(token=service.token(Scope.ADMIN, project="demo"))
    etag = http.get(PATH).json()["etag"]
    assert refused(own.put(PATH, json={"quota_bytes": None}, headers={"If-Match": etag})) == (403, "forbidden")
    assert answer(own.put(PATH, json={}))["quota_bytes"] == 1000


@pytest.mark.parametrize("value", ["false", "true", "0.5", "5.0", '"5"', "1e3"])
def test_a_number_is_a_number(http: httpx.Client, value: str) -> None:
    headers = {"If-Match": "*", "Content-Type": "application/json"}
    reply = http.put(PATH, content=f'{{"quota_bytes": {value}}}', headers=headers)
    assert refused(reply) == (422, "invalid_request")
    policy = http.put(
        f"{PATH}/policies/retention", json={"document": {"keep_last": True}}, headers={"If-None-Match": "*"}
    )
    assert refused(policy) == (422, "invalid_request")
