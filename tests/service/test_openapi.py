"""The OpenAPI document: complete, with unique operations, summaries, examples and problem replies."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast_service.web.openapi import EXAMPLES
from tests.support.service import RunningService


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


def test_each_operation_has_a_summary_a_tag_and_an_id_of_its_own(schema: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, operation in operations(schema)]
    assert len(set(ids)) == len(ids) > 25
    for name, operation in operations(schema):
        assert operation["summary"], name
        assert re.fullmatch(r"[a-z_]+", operation["operationId"]), name
        assert len(operation["tags"]) == 1, name


def test_each_operation_says_that_it_may_answer_with_a_problem(schema: dict[str, Any]) -> None:
    for name, operation in operations(schema):
        assert "422" not in operation["responses"], f"{name}: a 422 is a problem too"
        for status in ("4XX", "5XX"):
            assert "application/problem+json" in operation["responses"][status]["content"], name


def test_each_request_body_has_an_example(schema: dict[str, Any]) -> None:
    seen = set()
    for name, operation in operations(schema):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        if body is None:
            continue
        for reference in re.findall(r"#/components/schemas/(\w+)", str(body)):
            assert schema["components"]["schemas"][reference]["examples"], name
            seen.add(reference)
    assert seen == {type(example).__name__ for example in EXAMPLES}


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    assert schema["openapi"].startswith("3.1")
    references = set(re.findall(r"'#/components/schemas/(\w+)'", str(schema)))
    assert references <= set(schema["components"]["schemas"])
