"""The arguments that several commands share, and how their text is read."""

from __future__ import annotations

from typing import Annotated

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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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
