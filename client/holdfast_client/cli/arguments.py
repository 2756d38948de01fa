"""The arguments that several commands share, and how their text is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, TypeVar

import typer

from holdfast_protocol.selectors import Point, RunName, SelectorError, parse_run, parse_selector

RunArgument = Annotated[str, typer.Argument(metavar="PROJECT/RUN", help="For example demo/gpt.")]
SelectorArgument = Annotated[
    str,
    typer.Argument(
        metavar="PROJECT/RUN[@WHICH]",
        help="WHICH is latest, a step (1200), a step of an attempt (1200#3), best:METRIC[:max], or an id (ck_...).",
    ),
]
_Item = TypeVar("_Item")

_AT_MOST = typer.Option("--limit", "-n", min=1, help="At most so many: the first of the list.")
LimitOption = Annotated[int | None, _AT_MOST]
LimitedOption = Annotated[int, _AT_MOST]
"""For a list that would be endless without one."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def first(items: Iterable[_Item], limit: int | None) -> list[_Item]:
    """No page behind the last item is asked for."""
    return list(itertools.islice(items, limit))


def read_run(text: str) -> RunName:
    try:
        return parse_run(text)
    except SelectorError as error:
        raise typer.BadParameter(f"{error}.") from None


def read_selector(text: str) -> tuple[RunName, Point]:
    try:
        return parse_selector(text)
    except SelectorError as error:
        raise typer.BadParameter(f"{error}.") from None
