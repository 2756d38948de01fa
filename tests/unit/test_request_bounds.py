"""What every request may hold: numbers that are numbers, text that is text, and maps that end somewhere."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from holdfast_protocol.attempts import EndAttempt, OpenAttempt
from holdfast_protocol.base import Request, body_for, text_to_keep
from holdfast_protocol.checkpoints import MAX_COMPONENTS, MAX_METRICS, FailShard, SealShard
from holdfast_protocol.runs import EditProject
from holdfast_protocol.service import CreateToken
from holdfast_protocol.text import printable

pytestmark = pytest.mark.rule("limits-before-work")
FENCE: dict[str, Any] = {"epoch": 1, "attempt": 1}
OPEN: dict[str, Any] = {"launch_id": "l", "after": 0, "world_size": 1}


def sent_models(model: type[Request] = Request) -> Iterator[type[Request]]:
    for child in model.__subclasses__():
        yield child
        yield from sent_models(child)


def parts(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for each in get_args(annotation) for part in parts(each)]
    return [annotation]


FIELDS = [(model, name) for model in sent_models() for name in model.model_fields]


INTEGERS = [
    (model, name)
    for model, name in FIELDS
    if int in (kinds := parts(model.model_fields[name].annotation)) and bool not in kinds
]


def test_each_model_that_is_sent_is_walked() -> None:
    assert len(INTEGERS) > 50


@pytest.mark.parametrize(("model", "name"), INTEGERS)
@pytest.mark.parametrize("value", ["true", "2.0", '"2"'])
def test_an_integer_on_the_wire_is_an_integer(model: type[Request], name: str, value: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(model).validate_json(f'{{"{name}": {value}}}', strict=True)
    assert (name,) in [error["loc"][:1] for error in raised.value.errors()]


FLOATS = [(model, name) for model, name in FIELDS if float in parts(model.model_fields[name].annotation)]


@pytest.mark.parametrize(("model", "name"), FLOATS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_number_on_the_wire_is_finite(model: type[Request], name: str, value: str) -> None:
    assert len(FLOATS) > 10
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(model).validate_json(f'{{"{name}": {value}}}', strict=True)
    assert (name,) in [error["loc"][:1] for error in raised.value.errors()]


def test_examples_of_all_requests_pass_the_strict_reading() -> None:
    examples = [
        (model, example)
        for model in sent_models()
        for example in (model.model_config.get("json_schema_extra") or {}).get("examples", ())
    ]
    assert len(examples) > 30
    for model, example in examples:
        read = TypeAdapter(model).validate_json(json.dumps(example), strict=True)
        assert set(example) == read.model_fields_set, model.__name__


def test_maps_have_an_end() -> None:
    free = {"document", "policy", "retention", "tiers"}  # policies: 64 KiB of body, and a model of their own
    for model in sent_models():
        for name, schema in model.model_json_schema().get("properties", {}).items():
            for kind in (schema, *schema.get("anyOf", ())):
                assert name in free or kind.get("type") != "object" or kind["maxProperties"], f"{model.__name__}.{name}"


@pytest.mark.parametrize(
    "environment",
    [
        {str(number): "" for number in range(101)},
        {"k" * 101: "v"},
        {"k": "v" * 1001},
        {f"{number:0100}": "v" * 500 for number in range(60)},
        {"k": "\x1b[31m"},
    ],
)
def test_an_environment_has_an_end(environment: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        OpenAttempt(**OPEN, environment=environment)


@pytest.mark.parametrize("field", ["components", "metrics"])
def test_components_and_metrics_have_an_end(field: str) -> None:
    of = {"components": {"kind": "extra", "logical_bytes": 1}, "metrics": {"value": 1.0}}
    shard = {
        "digest": "0" * 64,
        "chunks": ["0" * 64],
        "index": {"shard": 0},
        "logical_bytes": 1,
        "components": {},
    }
    most = {"components": MAX_COMPONENTS, "metrics": MAX_METRICS}[field]
    SealShard.model_validate(FENCE | shard | {field: {str(number): of[field] for number in range(most)}})
    with pytest.raises(ValidationError):
        SealShard.model_validate(FENCE | shard | {field: {str(number): of[field] for number in range(most + 1)}})


@pytest.mark.parametrize("bad", ["\x1b]0;x\x07", "\u202e", "\x9b1m", "\r", "\u2028", "\x00", "\ud800", "\u200f"])
def test_what_a_terminal_obeys_is_no_text(bad: str) -> None:
    for made in (
        lambda: CreateToken(name=f"a{bad}", scopes=["read"]),
        lambda: FailShard(**FENCE, reason=bad),
        lambda: OpenAttempt(**OPEN, host=bad),
        lambda: SealShard.model_validate({**FENCE, "dropped_components": [bad]}),
    ):
        with pytest.raises(ValidationError, match=r"control characters|unicode string"):
            made()
    assert "\N{REPLACEMENT CHARACTER}" in printable(f"a{bad}b")
    assert FailShard(**FENCE, reason=text_to_keep(bad, 4000)).reason == "\N{REPLACEMENT CHARACTER}" + printable(bad)[1:]


def test_long_texts_have_lines_and_short_ones_are_one() -> None:
    trace = "Traceback:\n\tValueError"
    assert EndAttempt(**FENCE, outcome="failed", detail=trace).detail == trace
    with pytest.raises(ValidationError, match="line break"):
        EndAttempt(**FENCE, outcome="failed", error_type=trace)
    assert (
        EndAttempt(**FENCE, outcome="failed", error_type=text_to_keep(trace, 200)).error_type
        == "Traceback:  ValueError"
    )
    assert CreateToken(name="größer 中文 😀", scopes=["read"]).name == "größer 中文 😀"


def test_a_quota_that_is_left_out_is_not_sent_as_null() -> None:
    assert body_for(9, EditProject()) == b"{}"
    assert body_for(9, EditProject(quota_bytes=None)) == b'{"quota_bytes":null}'
