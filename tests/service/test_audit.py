"""Audit events: what people and controllers do is written down, in order, for ever, and read by whom it concerns."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import holdfast_service.liveness.abandoned_uploads
from holdfast_protocol.states import Scope
from holdfast_service.audit.record import record_event
from tests.service.conftest import Clock
from tests.support.interleave import refused
from tests.support.rank import Job, answer
from tests.support.service import RunningService

# The training protocol's own calls, and reading. What a job does is told by its attempts and checkpoints.
NOT_AUDITED = {
    "POST /v1/projects/{project}/runs/{run}/checkpoints": "begin",
    "POST /v1/checkpoints/{checkpoint_id}/shards/{rank}/chunks": "negotiate",
    "PUT /v1/checkpoints/{checkpoint_id}/shards": "seals of a host",
    "PUT /v1/checkpoints/{checkpoint_id}/shards/{rank}": "seal",
    "POST /v1/projects/{project}/runs/{run}/attempts/{number}/heartbeat": "heartbeat",
    "POST /v1/projects/{project}/runs/{run}/attempts/{number}/end": "the job's own end",
    "PUT /v1/projects/{project}/runs/{run}/attempts/{number}/resumed-from": "what the job has loaded",
    "POST /v1/checkpoints/{checkpoint_id}/reads": "tickets to read, under a lease",
    "DELETE /v1/read-leases/{lease_id}": "the reader is done",
    "POST /v1/mount-proofs": "a nonce",
    "POST /v1/store-samples": "a sample object, which is in no table",
    "POST /v1/store-samples/{sample_id}/check": "only looks",
    "DELETE /v1/store-samples/{sample_id}": "a sample object, which is in no table",
    "POST /v1/projects/{project}/runs/{run}/retention/plan": "only looks",
    "POST /v1/projects/{project}/runs/{run}/cost/forecast": "only looks",
    "PUT /v1/objects/{payload}": "bytes, by a signed URL",
    "POST /v1/sign-in-codes": "good for a minute; the session that it opens is told",
    "POST /v1/sign-ins": "a cookie for the way to a provider; the token that comes of it is told",
}


def events(service: RunningService, *, token: str = "", **wanted: Any) -> list[dict[str, Any]]:
    return answer(service.http(token=token).get("/v1/audit-events", params=wanted))["items"]  # type: ignore[no-any-return]


def actions(service: RunningService, **wanted: Any) -> list[str]:
    return [event["action"] for event in events(service, **wanted)]


def test_what_people_change_is_told_newest_first_with_who_and_why(service: RunningService, clock: Clock) -> None:
    http = service.http()
    answer(http.put("/v1/projects/demo", json={"quota_bytes": 10**9}))
    answer(http.put("/v1/projects/demo", json={"quota_bytes": 10**9}))
    job = Job(http)
    answer(http.put("/v1/projects/demo/runs/gpt"))
    saved = job.save(100)
    body = {"health": "quarantined", "health_reason": "loss spike", "labels": ["odd"]}
    answer(http.patch(f"/v1/checkpoints/{saved['id']}", json=body, headers={"If-Match": saved["etag"]}))
    aborted = job.begin(200).abort("given up: PUT https://store/x?sig=s3cret")
    token = answer(http.post("/v1/tokens", json={"name": "gone soon", "scopes": ["read"], "project": "demo"}))
    answer(http.delete(f"/v1/tokens/{token['id']}"))
    answer(http.delete(f"/v1/tokens/{token['id']}"))
    job.begin(300)
    clock.advance(30)  # a pass now and one later: the gap must not look like the service's own absence
    holdfast_service.liveness.abandoned_uploads.reconcile(service.context)
    told = events(service, project="demo")
    assert [event["action"] for event in told] == [
        "token.revoke",
        "token.create",
        "checkpoint.abort",
        "checkpoint.edit",
        "run.create",
        "project.quota",
        "project.create",
    ]
    assert token["token"].rpartition("_")[2] not in str(told)
    assert told[2]["reason"] == aborted["abort_reason"] == "given up: PUT https://store/x?***"
    edit = told[3]
    assert (edit["run"], edit["step"], edit["reason"], edit["actor_kind"]) == ("gpt", 100, "loss spike", "person")
    assert edit["before"] == {"health": "ok", "health_reason": None, "labels": []}
    assert edit["after"] == {"health": "quarantined", "health_reason": "loss spike", "labels": ["odd"]}
    assert (told[5]["before"], told[5]["after"]) == ({"quota_bytes": None}, {"quota_bytes": 10**9})
    first = answer(http.get("/v1/audit-events", params={"limit": 4, "project": "demo"}))
    rest = answer(http.get("/v1/audit-events", params={"cursor": first["next_cursor"], "project": "demo"}))
    assert first["items"] + rest["items"] == told
    assert actions(service, project="demo", run="gpt") == ["checkpoint.abort", "checkpoint.edit", "run.create"]
    assert actions(service, checkpoint=saved["id"]) == ["checkpoint.edit"]
    assert actions(service, action="token.", project="demo") == ["token.revoke", "token.create"]
    assert actions(service, action=["token.revoke", "token.create"], project="demo") == ["token.revoke", "token.create"]
    assert actions(service, actor="nobody") == []
    assert actions(service, project="demo", since=edit["at"], until=told[1]["at"]) == [
        "checkpoint.abort",
        "checkpoint.edit",
    ]


def test_what_controllers_do_is_told_too(service: RunningService, clock: Clock) -> None:
    job = Job(service.http())
    job.begin(100)
    reconcile = holdfast_service.liveness.abandoned_uploads.reconcile
    for _ in range(40):
        clock.advance(59)
        reconcile(service.context)
    told = events(service, actor_kind="controller", project="demo")
    assert sorted({event["action"] for event in told}) == ["attempt.lost", "checkpoint.abort"]
    assert all(event["actor"] == "reap" and event["reason"] for event in told)


def test_a_projects_token_sees_its_projects_events_only(service: RunningService) -> None:
    Job(service.http())
    service.make_project("other")
    mine = service.token(Scope.READ, project="other")
    assert {event["project"] for event in events(service, token=mine)} == {"other"}
    assert {event["project"] for event in events(service)} >= {"demo", "other"}
    with refused("forbidden"):
        events(service, token=mine, project="demo")
    with refused("forbidden"):
        events(service, token=service.token(Scope.TRAIN))


def test_nobody_changes_or_deletes_an_event(service: RunningService) -> None:
    service.make_project("demo")
    before = events(service)
    assert before
    for change in ("UPDATE audit_events SET reason = 'another'", "DELETE FROM audit_events"):
        with pytest.raises(DBAPIError, match="append-only"), service.context.database.engine.begin() as connection:
            connection.execute(text(change))
    assert events(service) == before


def test_every_route_that_changes_something_writes_an_event_or_is_on_the_list(service: RunningService) -> None:
    silent, audited, seen = [], 0, set()
    for route in iter_route_contexts(service.app.routes):
        for method in sorted((route.methods or set()) - {"GET", "HEAD", "OPTIONS"}):
            name = f"{method} {route.path}"
            writes = record_event.__code__ in reached(route.endpoint)
            audited += writes
            seen.add(name)
            if writes == (name in NOT_AUDITED):
                silent.append(f"{name} {'is on the list and' if writes else 'is not, and'} writes an event: {writes}")
    assert not silent
    assert audited > 10
    assert set(NOT_AUDITED) <= seen, "the list has routes that are gone"


def reached(function: Any) -> set[types.CodeType]:
    """Every function of the service that this one names, and those that they name: which code it can get to."""
    found: set[types.CodeType] = set()
    waiting = [function]
    while waiting:
        current = inspect.unwrap(waiting.pop())
        code = getattr(current, "__code__", None)
        if code is None or code in found or not current.__module__.startswith("holdfast_service"):
            continue
        found.add(code)
        waiting += named(code, current.__globals__)
    return found


def named(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a lambda or a comprehension
            yield from named(constant, names)
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, types.ModuleType) and value.__name__.startswith("holdfast_service"):
            yield from (getattr(value, each) for each in code.co_names if callable(getattr(value, each, None)))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_taking_back_a_run_and_a_project_tells_what_was_before(service: RunningService) -> None:
    http = service.http()
    job = Job(http)
    job.save(100)
    job.end()
    for path in ("/v1/projects/demo/runs/gpt", "/v1/projects/demo"):
        answer(http.request("DELETE", path, json={}, headers={"If-Match": "*"}))
    for path in ("/v1/projects/demo", "/v1/projects/demo/runs/gpt"):
        answer(http.post(f"{path}/undelete"))
    told = {event["action"]: (event["before"], event["after"]) for event in events(service)}
    (deleted,) = events(service, action="run.delete")
    assert told["checkpoint.undelete"] == ({"state": "trashed"}, {"state": "committed"})
    for action in ("run.undelete", "project.undelete"):
        assert told[action][0]["deleted_by"] == deleted["actor"]
        assert told[action][0]["purge_at"] is not None
    assert told["run.undelete"][1] == {"checkpoints": 1, "purged": 0}
