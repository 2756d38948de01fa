"""The OpenAPI document: complete, in one style, and true: what it declares is what the service does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast_service.web.openapi import TAGS
from tests.support.service import RunningService

# The last part of a route is a plural noun (a list, or what makes an item of it), a parameter (one item), a fact that
# a thing has once, or a verb that is sent to a thing with POST.
FACTS = {
    "advice",
    "config",
    "cost",
    "current",
    "diff",
    "goodput",
    "impact",
    "manifest",
    "metrics-history",
    "pin",
    "restore-point",
    "resumed-from",
    "service",
    "stream",
    "thaw",
    "usage",
}
VERBS = {
    "abort",
    "apply",
    "cancel",
    "check",
    "claim",
    "end",
    "exchange",
    "finish",
    "forecast",
    "heartbeat",
    "pause",
    "plan",
    "prune",
    "redeliver",
    "release",
    "resume",
    "rotate",
    "run",
    "test",
    "undelete",
}
# These change nothing: a plan needs no body where it has no question.
READ_VERBS = {"/v1/collections/plan", "/v1/projects/{project}/runs/{run}/tiers/plan"}
# The same subject again gives what is there, by itself: no key is needed.
REPEATABLE = {
    "attempts_open",
    "catalog_confirm",
    "checkpoints_begin",
    "projects_put",
    "runs_put",
    "policies_put_of_project",
    "policies_put_of_run",
    "stores_create_sample",
    "uploads_create_mount_proof",
    "controllers_run",
    "tiers_thaw",
    "webhooks_test",
    "objects_put_object",
    # A cookie for the way to a provider: the later one counts.
    "sessions_begin_sign_in",
    # Signing in twice opens two sessions: nobody has the one whose reply was lost, and it ends by itself.
    "sessions_finish_sign_in",
    "sessions_open",
    "sessions_make_code",
}


@pytest.fixture
def schema(service: RunningService) -> dict[str, Any]:
    reply = service.http(token=None).get("/openapi.json")
    assert reply.status_code == 200
    document: dict[str, Any] = reply.json()
    return document


def operations(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method} {path}", operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]


def header_names(operation: dict[str, Any]) -> set[str]:
    return {each["name"].lower() for each in operation.get("parameters", ()) if each["in"] == "header"}


def test_each_operation_has_a_summary_a_tag_and_an_id_of_its_own(schema: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, operation in operations(schema)]
    assert len(set(ids)) == len(ids) > 25
    for name, operation in operations(schema):
        assert operation["summary"], name
        assert re.fullmatch(r"[a-z]+(_[a-z]+)+", operation["operationId"]), name
        assert len(operation["tags"]) == 1, name
        assert operation["operationId"].startswith(operation["tags"][0]), name


def test_each_tag_says_what_it_is_about(schema: dict[str, Any]) -> None:
    assert {tag["name"] for tag in schema["tags"]} == set(TAGS)
    assert {operation["tags"][0] for _, operation in operations(schema)} == set(TAGS)


def test_it_says_who_may_call_and_where(schema: dict[str, Any]) -> None:
    by_token, by_cookie = schema["components"]["securitySchemes"].values()
    assert (by_token["type"], by_token["scheme"]) == ("http", "bearer")
    assert (by_cookie["type"], by_cookie["in"], by_cookie["name"]) == ("apiKey", "cookie", "holdfast_session")
    assert schema["servers"][0]["url"] == "/"
    assert schema["security"]
    open_routes = {name for name, operation in operations(schema) if operation.get("security") == []}
    assert {name.partition(" ")[2] for name in open_routes} == {
        "/healthz",
        "/readyz",
        "/v1/objects/{payload}",
        "/v1/tokens/exchange",
        "/v1/sign-ins/providers",
        "/v1/sign-ins",
        "/v1/sign-ins/finish",
    }


def test_routes_are_nouns_with_verbs_below_them(schema: dict[str, Any]) -> None:
    for name, _ in operations(schema):
        method, _, path = name.partition(" ")
        if not path.startswith("/v1/"):
            continue
        *above, last = path.removeprefix("/v1/").split("/")
        for part in above:
            assert part.startswith("{") or part.endswith("s") or part in {*FACTS, "retention", "catalog"}, name
        if last in VERBS:
            assert method == "post" or path in READ_VERBS, name
        else:
            assert last.startswith("{") or last in FACTS or last.endswith("s"), name


def test_lists_have_pages(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema):
        reply = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if "Page_" in str(reply):
            assert {"cursor", "limit"} <= {each["name"] for each in operation["parameters"]}, name


def test_what_replaces_or_deletes_takes_if_match(schema: dict[str, Any]) -> None:
    without = {
        name
        for name, operation in operations(schema)
        if name.startswith(("put ", "patch ", "delete ")) and "if-match" not in header_names(operation)
    }
    # Each of these can be sent again, and none can undo what another caller has done.
    assert without == {
        "put /v1/projects/{project}/runs/{run}",  # makes it, and changes nothing
        "put /v1/projects/{project}/runs/{run}/attempts/{number}/resumed-from",  # the fence guards it
        "put /v1/checkpoints/{checkpoint_id}/shards",  # the same content, or manifest_conflict
        "put /v1/checkpoints/{checkpoint_id}/shards/{rank}",  # likewise
        "put /v1/objects/{payload}",  # the ticket guards it
        "patch /v1/holds/{hold_id}",  # moves the end further away, and never back
        "delete /v1/read-leases/{lease_id}",
        "delete /v1/store-samples/{sample_id}",
        "delete /v1/sessions/current",  # its own, for good
        "delete /v1/sessions/{session_id}",  # for good
        "delete /v1/tokens/current",  # its own, for good
        "delete /v1/tokens/{token_id}",  # for good
        "delete /v1/webhooks/{webhook_id}",  # for good
    }


def test_what_makes_something_is_201_or_202_and_can_be_sent_twice(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema):
        makes = {"201", "202"} & set(operation["responses"])
        if makes and operation["operationId"] not in REPEATABLE:
            assert "idempotency-key" in header_names(operation), name
        if "OperationView" in str(operation["responses"].get("200", {})):
            assert name.startswith("get ") or name.endswith("/cancel"), f"{name} starts something: 202"


def test_each_operation_says_that_it_may_answer_with_a_problem(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema):
        assert "422" not in operation["responses"], f"{name}: a 422 is a problem too"
        for status in ("4XX", "5XX"):
            assert "application/problem+json" in operation["responses"][status]["content"], name


def test_each_request_body_has_an_example(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        for reference in re.findall(r"#/components/schemas/(\w+)", str(body)):
            assert schema["components"]["schemas"][reference].get("examples"), (name, reference)


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    assert schema["openapi"].startswith("3.1")
    references = set(re.findall(r"'#/components/schemas/(\w+)'", str(schema)))
    assert references <= set(schema["components"]["schemas"])
