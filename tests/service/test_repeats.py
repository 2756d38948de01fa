"""A call that makes something and is sent twice, with the client's Idempotency-Key, makes one thing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from holdfast_service.background.registry import OPERATION_KINDS
from holdfast_service.db.tables.core import Token
from holdfast_service.db.tables.operations import IdempotencyKey
from holdfast_service.operations.controller import reconcile as operations_pass
from tests.service.conftest import Clock
from tests.support.rank import Job, answer
from tests.support.retention import HOUR, purge
from tests.support.service import RunningService

TOKEN = {"name": "a trainer", "scopes": ["read"]}
KEY = {"Idempotency-Key": "one"}


def make(service: RunningService, **more: Any) -> httpx.Response:
    return service.http().post("/v1/tokens", json=TOKEN | more, headers=KEY)


def names(service: RunningService) -> list[str]:
    with service.context.database.read() as session:
        return list(session.scalars(select(Token.name).where(Token.name == TOKEN["name"])))


def test_a_repeated_call_makes_nothing_and_names_what_the_first_made(service: RunningService) -> None:
    first = make(service)
    assert first.status_code == 201
    again = make(service)
    assert (again.status_code, again.json()["code"]) == (409, "already_made")
    assert again.json()["context"]["id"] == first.json()["id"]
    assert first.json()["token"] not in again.text
    assert names(service) == [TOKEN["name"]]


def test_a_key_belongs_to_one_call(service: RunningService) -> None:
    make(service)
    other = make(service, expires_in_seconds=60)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    # Another token's key of the same text is another key.
    stranger = service.http(token=service.token())
    assert stranger.post("/v1/tokens", json=TOKEN, headers=KEY).status_code == 201


def test_of_two_at_once_one_makes_it(service: RunningService) -> None:
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: make(service).status_code, range(4)))
    assert sorted(replies) == [201, 409, 409, 409]
    assert len(names(service)) == 1


def test_a_call_that_was_refused_leaves_its_key_free(service: RunningService) -> None:
    assert make(service, project="demo").status_code == 404
    service.make_project("demo")
    assert make(service, project="demo").status_code == 201


def test_an_operation_that_has_ended_is_not_started_again(service: RunningService) -> None:
    job = Job(service.http())
    job.save(1)
    route = f"{job.base}/scrubs"
    first = service.http().post(route, json={}, headers=KEY)
    assert first.status_code == 202
    operations_pass(service.context, kinds=OPERATION_KINDS)
    again = answer(service.http().post(route, json={}, headers=KEY))
    assert (again["id"], again["state"]) == (first.json()["id"], "done")
    assert answer(service.http().post(route, json={}))["id"] != again["id"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_service_forgets_a_key_after_a_week(service: RunningService, clock: Clock) -> None:
    make(service)
    clock.advance(8 * 24 * HOUR)
    purge(service)
    with service.context.database.read() as session:
        assert session.scalars(select(IdempotencyKey.key)).all() == []


def test_a_hold_and_a_webhook_know_their_key_too(service: RunningService) -> None:
    job = Job(service.http())
    saved = job.save(1)
    holds = [
        answer(service.http().post(f"/v1/checkpoints/{saved['id']}/holds", json={"reason": "audit"}, headers=KEY))["id"]
        for _ in range(2)
    ]
    assert holds[0] == holds[1]
    hook = {"url": "https://alerts.example/hook", "events": ["attempt.lost"]}
    codes = [
        service.http().post("/v1/projects/demo/webhooks", json=hook, headers={"Idempotency-Key": "two"}).status_code
        for _ in range(2)
    ]
    assert codes == [201, 409]
