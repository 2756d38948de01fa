"""A token of one project, with every scope, at each route: it reads nothing of another project and changes nothing."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from tests.service.test_sessions import WRITES, filled, guarded_routes
from tests.support.rank import Job, answer
from tests.support.service import RunningService

NAME = "sesame"
"""In every name and text of the other project: where it stands in a reply, something was told."""
OF_NOBODY = {
    "/v1/read-leases/{lease_id}": "test_protocol_reading.py: it ends the caller's own, and says nothing of another's",
    "/v1/store-samples/{sample_id}": "samples belong to no project",
    "/v1/store-samples/{sample_id}/check": "likewise",
}
# Else the examples of OpenAPI. These two would be refused for what they say before anybody asks whose checkpoint it is.
BODIES = {
    "/v1/checkpoints/{checkpoint_id}/shards/{rank}": {"epoch": 1, "attempt": 1, "outcome": "failed", "reason": "x"},
    "/v1/projects/{project}/runs/{run}/attempts": {"launch_id": "l", "after": 1, "world_size": 1, "create": True},
}


@pytest.fixture
def theirs(service: RunningService) -> dict[str, str]:
    """A project with one of each, by the names that paths have for them."""
    http = service.http()
    job = Job(http, f"{NAME}/{NAME}", world_size=1, host=NAME, environment={"k": NAME}, config={"k": NAME})
    saved = job.save(5, content=NAME.encode())
    at = f"/v1/checkpoints/{saved['id']}"
    answer(http.patch(job.base, json={"tags": [NAME], "note": NAME}, headers={"If-Match": "*"}))
    hold = answer(http.post(f"{at}/holds", json={"reason": NAME}))
    hook = {"url": f"https://{NAME}.example/x", "events": ["attempt.lost"]}
    webhook = answer(http.post(f"/v1/projects/{NAME}/webhooks", json=hook))
    delivery = answer(http.post(f"/v1/webhooks/{webhook['id']}/test"))
    answer(http.put(f"/v1/projects/{NAME}/policies/retention", json={"document": {"keep_last": 3}}))
    operation = answer(http.post(f"{at}/scrubs", json={}))
    token = answer(http.post("/v1/tokens", json={"name": NAME, "project": NAME, "scopes": ["read"]}))
    session = answer(service.http(token=token["token"]).post("/v1/sessions"))
    return {
        "project": NAME,
        "run": NAME,
        "number": "3",
        "checkpoint_id": saved["id"],
        "rank": "0",
        "selector": "latest",
        "kind": "retention",
        "digest": hashlib.sha256(NAME.encode()).hexdigest(),
        "hold_id": hold["id"],
        "webhook_id": webhook["id"],
        "delivery_id": delivery["id"],
        "operation_id": operation["id"],
        "token_id": token["id"],
        "session_id": session["id"],
        "role": "primary",
        "name": "webhooks",
    }


@pytest.fixture
def neighbour(service: RunningService) -> httpx.Client:
    service.make_project("mine")
    Job(service.http(), "mine/gpt", world_size=1).save(5)
    return service.http(token=service.token(project="mine"))


def examples(service: RunningService) -> dict[tuple[str, str], Any]:
    """By method and path, a body that the route takes."""
    schema = service.app.openapi()
    found: dict[tuple[str, str], Any] = {}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            first = body if "$ref" in body else next(iter(body.get("anyOf", body.get("oneOf", ()))), {})
            if name := first.get("$ref", "").rpartition("/")[2]:
                found[method.upper(), path] = BODIES.get(path, schema["components"]["schemas"][name]["examples"][0])
    return found


def state_of(service: RunningService, theirs: dict[str, str]) -> list[Any]:
    """What an administrator sees of the project."""
    http = service.http()
    paths = (
        "/v1/projects/{project}",
        "/v1/projects/{project}/runs/{run}",
        "/v1/projects/{project}/runs/{run}/attempts",
        "/v1/checkpoints/{checkpoint_id}",
        "/v1/checkpoints/{checkpoint_id}/holds",
        "/v1/projects/{project}/webhooks",
        "/v1/webhooks/{webhook_id}/deliveries",
        "/v1/projects/{project}/policies/{kind}",
        "/v1/audit-events?project={project}",
        "/v1/operations?project={project}",
    )
    tokens = [each for each in answer(http.get("/v1/tokens"))["items"] if each["project"] == NAME]
    sessions = [each for each in answer(http.get("/v1/sessions"))["items"] if each["project"] == NAME]
    return [*(answer(http.get(filled(path, theirs))) for path in paths), tokens, sessions]


def test_no_route_tells_or_changes_anything_of_another_project(
    service: RunningService, theirs: dict[str, str], neighbour: httpx.Client
) -> None:
    bodies, before = examples(service), state_of(service, theirs)
    reads = writes = 0
    for method, path in guarded_routes(service):
        if path in OF_NOBODY:
            continue
        sent: dict[str, Any] = {"headers": {"If-Match": "*"}}
        if (method, path) in bodies:
            sent["json"] = bodies[method, path]
        if path == "/v1/events/stream":
            sent["params"] = {"seconds": 0}
        if path.endswith("/diff"):
            sent["params"] = {"against": theirs["checkpoint_id"]}
        reply = neighbour.request(method, filled(path, theirs), **sent)
        assert reply.is_error or NAME not in reply.text, f"{method} {path} tells {reply.text}"
        if "{" not in path:
            continue
        if method in WRITES:
            assert reply.is_error, f"{method} {path} answers {reply.status_code}"
            writes += reply.status_code in (403, 404)
        else:
            assert reply.status_code in (403, 404), f"{method} {path} answers {reply.status_code}"
            reads += 1
    assert state_of(service, theirs) == before
    assert reads > 25
    assert writes > 25, "the bodies are refused before anybody asks whose it is"


@pytest.mark.parametrize("path", ["events", "operations", "audit-events", "holds", "collections/plan"])
def test_no_filter_of_a_list_leads_to_another_project(
    theirs: dict[str, str], neighbour: httpx.Client, path: str
) -> None:
    reply = neighbour.get(f"/v1/{path}", params={"project": theirs["project"]})
    assert reply.status_code == 403


@pytest.mark.parametrize(
    "path", ["projects", "runs", "checkpoints", "events", "operations", "audit-events", "holds", "tokens", "sessions"]
)
def test_a_cursor_of_who_sees_more_shows_no_more(
    service: RunningService, theirs: dict[str, str], neighbour: httpx.Client, path: str
) -> None:
    cursor: str | None = None
    for _ in range(5):
        asked = {"limit": 1} if cursor is None else {"limit": 1, "cursor": cursor}
        page = neighbour.get(f"/v1/{path}", params=asked)
        assert page.status_code == 200
        assert NAME not in page.text
        cursor = answer(service.http().get(f"/v1/{path}", params=asked))["next_cursor"]
        if cursor is None:
            break
