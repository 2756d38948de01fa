"""The arguments that several commands share, each with one meaning everywhere, and the client that they use."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from math import isinf
from typing import Annotated, TypeVar

import typer

from holdfast_client.cli.output import ExitCode
from holdfast_client.cli.say import show_note
from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.runs import Point, SelectorError, parse_run, parse_selector
from holdfast_protocol.states import StoreRole
from holdfast_protocol.text import counted

LONGEST_RETRY_SECONDS = 5.0


def connect(*, retry_seconds: float | None = None) -> Client:
    """`retry_seconds`: in place of what is right for a person who waits."""
    settings = ClientSettings()
    if retry_seconds is None:
        retry_seconds = min(settings.retry_seconds, LONGEST_RETRY_SECONDS)
    client = Client(settings.model_copy(update={"retry_seconds": retry_seconds}))
    client.transport.on_retry = _SayOnce(retry_seconds)
    return client


class _SayOnce:
    """Without it, a command that waits for an unavailable service would look as if it hung."""

    def __init__(self, retry_deadline_seconds: float) -> None:
        self._seconds = retry_deadline_seconds
        self._said = False

    def __call__(self, failure: HoldfastError) -> None:
        if not self._said:
            self._said = True
            long = "until it answers" if isinf(self._seconds) else f"for {counted(round(self._seconds), 'second')}"
            show_note(f"holdfast: {failure} Retrying {long}...")


ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="For example demo.")]
RunArgument = Annotated[str, typer.Argument(metavar="PROJECT/RUN", help="For example demo/gpt.")]
TargetArgument = Annotated[
    str, typer.Argument(metavar="PROJECT[/RUN]", help="A run, or a project for all of its runs: demo/gpt, demo.")
]
WHICH = "WHICH is latest, a step (1200), a step of an attempt (1200#3), best:METRIC[:max], or an id (ck_...)."
SelectorArgument = Annotated[str, typer.Argument(metavar="PROJECT/RUN[@WHICH]", help=f"{WHICH} Without it: latest.")]
OnlyTarget = Annotated[
    str | None, typer.Argument(metavar="[PROJECT[/RUN]]", help="Only of this project, or of this run: demo, demo/gpt.")
]
OnlyProject = Annotated[str | None, typer.Argument(metavar="[PROJECT]", help="Only this project's.")]
OnlyOf = Annotated[
    str | None,
    typer.Argument(metavar="[PROJECT[/RUN[@WHICH]]]", help="Only of this project, run or checkpoint."),
]
_Item = TypeVar("_Item")

_AT_MOST = typer.Option("--limit", "-n", min=1, help="At most so many: the first of the list.")
LimitOption = Annotated[int | None, _AT_MOST]
LimitedOption = Annotated[int, _AT_MOST]
"""For a list that would be endless without one."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why, for the people who look for it later.")]
DeletedOption = Annotated[bool, typer.Option("--deleted", help="Only those in the trash.")]
StoreOption = Annotated[
    StoreRole | None, typer.Option("--store", help="Only the store of this role; without it: every one.")
]
SinceOption = Annotated[str | None, typer.Option(help="From then on: 2h, 7d, 2026-11-01 (UTC).")]
UntilOption = Annotated[str | None, typer.Option(help="Before then, likewise.")]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the result, with progress on stderr.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would happen.")]


def exit_unless_meant(what: str, *, yes: bool, dry_run: bool) -> None:
    """`what` was not done, because `--yes` is missing: exit code 2, unless the user has given `--dry-run`."""
    if not (yes or dry_run):
        show_note(f"Nothing was {what}. Say --yes if you mean it.")
        raise typer.Exit(ExitCode.USAGE)


def first(items: Iterable[_Item], limit: int | None) -> list[_Item]:
    """Asks for no page after the last item."""
    return list(itertools.islice(items, limit))


def say_if_cut(found: Sequence[object], limit: int) -> None:
    """For a list with a LimitedOption: what is not shown must not look as if it were not there."""
    if len(found) >= limit:
        show_note(f"holdfast: the first {limit}. There may be more: --limit says how many are shown.")


def read_run(text: str) -> RunName:
    try:
        return parse_run(text)
    except SelectorError as error:
        raise typer.BadParameter(f"{error}.") from None


def read_target(text: str) -> tuple[str, str | None]:
    """`demo` -> ("demo", None); `demo/gpt` -> ("demo", "gpt")."""
    if "/" not in text:
        return text, None
    name = read_run(text)
    return name.project, name.run


def read_selector(text: str) -> tuple[RunName, Point]:
    try:
        return parse_selector(text)
    except SelectorError as error:
        raise typer.BadParameter(f"{error}.") from None


def select(client: Client, text: str) -> CheckpointView:
    """The checkpoint that a SelectorArgument names."""
    name, point = read_selector(text)
    return client.checkpoints.select(name.project, name.run, str(point))


_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def read_duration(text: str) -> int:
    """`12h`, `90d` -> seconds."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time; write for example 30m, 12h, 90d or 4w.")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def read_lifetime(text: str) -> int | None:
    """Likewise, of what need not end: `never` -> None."""
    return None if text.strip().lower() == "never" else read_duration(text)


def read_moment(text: str, *, ago: bool = False) -> datetime:
    """`2027-01-31`, `2027-01-31T12:00` (UTC unless it says otherwise), or `90d` from now or ago."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        seconds = read_duration(text)
        return datetime.now(UTC) + timedelta(seconds=-seconds if ago else seconds)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def read_past(text: str | None) -> datetime | None:
    """The value of a SinceOption or an UntilOption."""
    return None if text is None else read_moment(text, ago=True)
