"""The pages `reference/rest.md` and `reference/problems.md` of the site, made of the application's own OpenAPI document
and of the problem codes. scripts/site_hooks.py asks for them at each build, so they cannot say anything else than the
code."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from holdfast_protocol.problems import PROBLEM_KINDS
from holdfast_service.app import openapi_document

_REST_HEAD = """# REST

Made of the service's own OpenAPI document, which each service has at `/openapi.json`. A call carries
`Authorization: Bearer <token>`. A reply that is no success is a [problem](problems.md).
"""
_PROBLEMS_HEAD = """# Problems

The body of every reply that is no success, as RFC 9457 has it (`application/problem+json`). Programs go by `code`: a
code never changes its meaning. Its `type` is `https://holdfast.dev/problems/` and the code.

| code | status | what it means | the same call may succeed later |
| --- | --- | --- | --- |
"""
_REFERENCE = "#/components/schemas/"


def problems_page() -> str:
    """Markdown: a row for each problem code."""
    rows = (
        f'| <span id="{code.value}"></span>`{code.value}` | {kind.status} | {kind.title} | {_yes(kind.retryable)} |'
        for code, kind in PROBLEM_KINDS.items()
    )
    return _PROBLEMS_HEAD + "\n".join(rows) + "\n"


def rest_page() -> str:
    """Markdown: a section for each tag with its operations, and the models that they take and give."""
    document = openapi_document()
    operations = sorted(
        (
            (operation["tags"][0], f"{method.upper()} {path}", operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ),
        key=lambda each: each[0],
    )
    parts = [_REST_HEAD]
    for tag, group in groupby(operations, key=lambda each: each[0]):
        parts.append(f"## {tag}\n")
        parts += [_operation(name, operation) for _, name, operation in group]
    parts.append("## Models\n")
    parts += [_model(name, model) for name, model in sorted(document["components"]["schemas"].items())]
    return "\n".join(parts)


def _operation(name: str, operation: dict[str, Any]) -> str:
    about = f"{_text(operation['summary'])}. {_text(operation.get('description', ''))}"
    lines = [f"### `{name}`\n", about.rstrip(), ""]
    parameters = operation.get("parameters", [])
    if parameters:
        lines += ["| parameter | in | type | required | what it is |", "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | {_yes(each.get('required', False))} | "
            f"{_text(each.get('description', each['schema'].get('description', '')))} |"
            for each in parameters
        ]
        lines.append("")
    if body := operation.get("requestBody"):
        lines.append("Body: " + ", ".join(_content(kind, each) for kind, each in body["content"].items()) + ".\n")
    replies = []
    for status, reply in operation["responses"].items():
        if status not in ("4XX", "5XX"):
            given = ", ".join(_content(kind, each) for kind, each in reply.get("content", {}).items())
            replies.append(f"{status} {given or 'without a body'}")
    lines.append(f"Reply: {'; '.join(replies)}.\n")
    return "\n".join(lines)


def _model(name: str, model: dict[str, Any]) -> str:
    lines = [f"### {name}\n"]
    if about := model.get("description"):
        lines.append(_text(about) + "\n")
    if values := model.get("enum"):
        lines.append("One of " + ", ".join(f"`{value}`" for value in values) + ".\n")
    if fields := model.get("properties"):
        required = set(model.get("required", ()))
        lines += ["| field | type | required | what it is |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{field}` | {_type(schema)} | {_yes(field in required)} | {_text(schema.get('description', ''))} |"
            for field, schema in fields.items()
        ]
        lines.append("")
    return "\n".join(lines)


def _content(kind: str, content: dict[str, Any]) -> str:
    schema = content.get("schema") or {}
    return _type(schema) if kind == "application/json" and schema else f"`{kind}`"


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words; models are links to their section."""
    if reference := schema.get("$ref"):
        name = reference.removeprefix(_REFERENCE)
        return f"[{name}](#{name.lower()})"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " or ".join(_type(each) for each in schema[union])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("maximum", "to"), ("minLength", "from"), ("maxLength", "to"))
        if key in schema
    ]
    form = f" ({schema['format']})" if "format" in schema else ""
    return " ".join([f"{kind}{form}", *bounds])


def _text(text: str) -> str:
    """One line that a table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").rstrip(".") if text else ""


def _yes(value: bool) -> str:
    return "yes" if value else ""
