"""Finishes the OpenAPI document that FastAPI makes: examples go in, and errors that are never sent go out."""

from __future__ import annotations

from typing import Any

from holdfast_service.web.examples import EXAMPLES

# FastAPI's own form of a 422; web/problem_reply.py answers with a Problem instead, which 4XX stands for.
_NEVER_SENT = ("HTTPValidationError", "ValidationError")


def finished(schema: dict[str, Any]) -> dict[str, Any]:
    """The same document, changed in place; twice is fine."""
    models = schema.get("components", {}).get("schemas", {})
    for example in EXAMPLES:
        model = models.get(type(example).__name__)
        if model is not None:
            model["examples"] = [example.model_dump(mode="json", exclude_defaults=True)]
    for name in _NEVER_SENT:
        models.pop(name, None)
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    return schema
