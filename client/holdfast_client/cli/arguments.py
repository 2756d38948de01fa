"""The arguments that several commands share, and the client that they use."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Annotated, TypeVar

import typer

from holdfast_client.cli.say import show_note
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.settings import ClientSettings
from holdfast_protocol.runs import Point, RunName, SelectorError, parse_run, parse_selector
from holdfast_protocol.text import counted

# The client of a command. A person waits for it: it gives up sooner than a trainer, and says at once that it waits.

LONGEST_RETRY_SECONDS = 5.0


def connect() -> Client:
    settings = ClientSettings()
    patience = min(settings.retry_seconds, LONGEST_RETRY_SECONDS)
    client = Client(settings.model_copy(update={"retry_seconds": patience}))
    client.transport.on_retry = _SayOnce(patience)
    return client


class _SayOnce:
    """Else a command that waits for a service that is down looks as if it hung."""

    def __init__(self, retry_deadline_seconds: float) -> None:
        self._seconds = retry_deadline_seconds
        self._said = False

    def __call__(self, failure: HoldfastError) -> None:
        if not self._said:
            self._said = True
            show_note(f"holdfast: {failure} Retrying for {counted(round(self._seconds), 'second')}...")


# The arguments that several commands share, and how their text is read.

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


_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def read_duration(text: str) -> int | None:
    """`12h`, `90d` -> seconds; `never` -> None."""
    if text.strip().lower() == "never":
        return None
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time; write for example 30m, 12h, 90d, 4w or never.")
    return int(match[1]) * _UNIT_SECONDS[match[2]]
