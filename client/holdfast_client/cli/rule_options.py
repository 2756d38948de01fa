"""The rules of a retention policy as options of a command: `--keep-last 3 --keep-within-daily 7d --keep-best loss:3`.

They are made of the model, so that a rule is described in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from holdfast_protocol.retention import RetentionPolicy

_SEVERAL = ("keep_best", "keep_labels")
_OPTIONS = {"keep_labels": "--keep-label"}
_METAVARS = {"keep_best": "METRIC[:max][:N]", "keep_labels": "LABEL"}


def with_rules(command: Callable[..., None]) -> Callable[..., None]:
    """`command(rules=…)`, as typer sees it: an option per rule instead of `rules`, a document with those given."""

    def run(**given: Any) -> None:
        rules = {name: _value(name, given.pop(name)) for name in RetentionPolicy.model_fields}
        command(rules={name: value for name, value in rules.items() if value is not None}, **given)

    own = inspect.signature(command, eval_str=True)
    parameters = [each for each in own.parameters.values() if each.name != "rules"]
    parameters += [_parameter(name) for name in RetentionPolicy.model_fields]
    run.__signature__ = own.replace(parameters=[_by_keyword(each) for each in parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _by_keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _parameter(name: str) -> inspect.Parameter:
    field = RetentionPolicy.model_fields[name]
    option = typer.Option(
        _OPTIONS.get(name, "--" + name.replace("_", "-")),
        help=field.description,
        metavar=_METAVARS.get(name, "SPAN" if "within" in name else "N"),
        show_default=False,
    )
    kind = list[str] | None if name in _SEVERAL else str | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, option],
    )


def _value(name: str, text: Any) -> Any:
    """As the document has it. What is no number is left to the model, which says what it must be."""
    if text is None or text == []:
        return None
    if name == "keep_best":
        return [_best(each) for each in text]
    if isinstance(text, str) and text.isdecimal():
        return int(text)
    return text


def _best(text: str) -> dict[str, Any]:
    metric, *rest = text.split(":")
    best: dict[str, Any] = {"metric": metric}
    for part in rest:
        best["n" if part.isdecimal() else "mode"] = int(part) if part.isdecimal() else part
    return best
