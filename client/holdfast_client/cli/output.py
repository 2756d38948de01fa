"""How results reach the screen, as JSON for programs or a table; and the meaning of the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import IntEnum

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast_client.cli.say import show_note
from holdfast_client.errors import (
    ConfigurationError,
    Conflict,
    HoldfastError,
    IntegrityError,
    InvalidRequest,
    NotFound,
    ReadsWrongHere,
    ServiceUnavailable,
    StaleAttempt,
    TokenProblem,
)
from holdfast_protocol.checkpoints import MetricValue
from holdfast_protocol.runs import MetricPoint
from holdfast_protocol.text import printable


class ExitCode(IntEnum):
    """What the exit status of `holdfast` says. Scripts rely on it: a code never changes its meaning.

    | code | meaning |
    | --- | --- |
    | 0 | done |
    | 1 | failed for another reason, which stands on stderr |
    | 2 | the command line or a setting is wrong |
    | 3 | what was named is not there, or there is no restore point |
    | 4 | the token is missing, wrong, expired, or may not do this |
    | 5 | the service or its store cannot be reached; try again |
    | 6 | bytes are not what they should be |
    | 7 | a newer attempt has taken over, or it was changed in between |
    | 75 | `holdfast launch`: the job was preempted; launch it again |
    | 76 | `holdfast launch`: no rank has told how the job ended; launch it again, and look if it happens again |
    | 79 | `holdfast launch`: another launch has taken over the run; do not launch this one again |

    75 is EX_TEMPFAIL of sysexits.h, as batch systems know it. Where each node runs its own `holdfast launch`, srun
    reports the highest code: that is why "do not" is above the other two.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    TOKEN = 4
    UNAVAILABLE = 5
    INTEGRITY = 6
    STALE = 7
    PREEMPTED = 75
    UNKNOWN = 76
    FENCED = 79


_BY_KIND: tuple[tuple[type[HoldfastError], ExitCode], ...] = (
    (ConfigurationError, ExitCode.USAGE),
    (InvalidRequest, ExitCode.USAGE),
    (NotFound, ExitCode.NOT_FOUND),
    (TokenProblem, ExitCode.TOKEN),
    (ServiceUnavailable, ExitCode.UNAVAILABLE),
    (IntegrityError, ExitCode.INTEGRITY),
    (ReadsWrongHere, ExitCode.INTEGRITY),
    (StaleAttempt, ExitCode.STALE),
    (Conflict, ExitCode.STALE),
)


def exit_code_of(error: HoldfastError) -> ExitCode:
    return next((code for kind, code in _BY_KIND if isinstance(error, kind)), ExitCode.FAILED)


NOTHING = "-"
_STYLES = {
    "committed": "green",
    "ok": "green",
    "uploading": "yellow",
    "skipped": "yellow",
    "warning": "yellow",
    "aborted": "red",
    "corrupt": "red",
    "diverged": "red",
    "quarantined": "red",
    "failed": "red",
    "training": "green",
    "finished": "green",
    "stalled": "yellow",
    "lost": "red",
}


# A cell of at most so many letters is never folded, and a column of text is never narrower.
_NEVER_FOLDED_LETTERS = 24
_GAP_LETTERS = 2
_ANY_WIDTH = 100_000


def _print(table: Table, least_width: int) -> None:
    """In a terminal, text is folded at its blanks. A name, a number or a time never is, so a line may be wider than the
    screen. Elsewhere a row is one whole line."""
    console = Console(highlight=False)
    console.width = max(console.width, least_width) if console.is_terminal else _ANY_WIDTH
    with console.capture() as captured:
        console.print(table)
    # rich fills every line with blanks, which disturb grep and copying.
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _least_width(cells: Sequence[str]) -> tuple[int, bool]:
    """A column's least letters, and whether it is folded at all."""
    longest = max((len(line) for cell in cells for line in cell.splitlines()), default=0)
    word = max((len(word) for cell in cells for word in cell.split()), default=0)
    if longest <= _NEVER_FOLDED_LETTERS or word == longest:
        return longest, False
    return max(word, _NEVER_FOLDED_LETTERS), True


def show_json(value: BaseModel | Iterable[BaseModel] | None) -> None:
    """One object, an array of all items of a list, or null."""
    document: object = None
    if isinstance(value, BaseModel):
        document = value.model_dump(mode="json")
    elif value is not None:
        document = [item.model_dump(mode="json") for item in value]
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, nothing: str) -> None:
    """Columns that begin with `>` are numbers, aligned right. `nothing` is printed if there are no rows."""
    found = [[printable(cell, one_line=True) for cell in row] for row in rows]
    if not found:
        show_note(nothing)
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAP_LETTERS, 0, 0), header_style="bold")
    least = 0
    for column, cells in zip(columns, zip(*found, strict=True), strict=True):
        name = column.removeprefix(">")
        width, folded = _least_width([name, *cells])
        table.add_column(name, justify="left" if name == column else "right", min_width=width, no_wrap=not folded)
        least += width + _GAP_LETTERS
    for row in found:
        table.add_row(*(styled(cell) for cell in row))
    _print(table, least)


def show_plot(points: Sequence[MetricPoint], *, width: int, height: int) -> None:
    """A curve in plain characters: `*` where the points are, `|` between the least and the greatest of a column, `!`
    above one that has a value that is not finite; `+` on the axis where another attempt begins."""
    finite = [point.value for point in points if point.value is not None]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    height = height if high > low else 1
    first, last = points[0].step, points[-1].step
    columns: dict[int, list[MetricPoint]] = {}
    for point in points:
        columns.setdefault((point.step - first) * (width - 1) // max(last - first, 1), []).append(point)
    grid = [[" "] * width for _ in range(height + 1)]  # the uppermost line is for what is not finite
    axis = ["-"] * width
    attempt = points[0].attempt
    for column, here in columns.items():
        if here[-1].attempt != attempt:
            attempt, axis[column] = here[-1].attempt, "+"
        at = [_line_of(point.value, low, high, height) for point in here if point.value is not None]
        for line in range(min(at, default=0), max(at, default=-1) + 1):
            grid[line][column] = "|"
        for line in at:
            grid[line][column] = "*"
        if any(point.nonfinite for point in here):
            grid[0][column] = "!"
    names = ["", f"{high:.6g}" if finite else "", *[""] * (height - 2), *([f"{low:.6g}"] if height > 1 else [])]
    margin = max(map(len, names))
    for name, cells in zip(names, grid, strict=True):
        if cells is not grid[0] or "!" in cells:
            sys.stdout.write(f"{name:>{margin}} |{''.join(cells)}".rstrip() + "\n")
    sys.stdout.write(f"{'':>{margin}} +{''.join(axis)}\n")
    sys.stdout.write(f"{'':>{margin}}  {first}{last:>{max(width - len(str(first)), len(str(last)) + 1)}}\n")


def _line_of(value: float, low: float, high: float, height: int) -> int:
    """From 1, the highest, to `height`. Halves, because the difference of two finite numbers may not be finite."""
    share = (high / 2 - value / 2) / (high / 2 - low / 2) if high > low else 0.5
    return 1 + round(min(max(share, 0.0), 1.0) * (height - 1))


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """One fact a line: its name, and its value folded beside it."""
    found = [(name, printable(value)) for name, value in facts]
    names, _ = _least_width([name for name, _ in found])
    values, folded = _least_width([value for _, value in found])
    table = Table(box=None, pad_edge=False, padding=(0, _GAP_LETTERS, 0, 0), show_header=False)
    table.add_column(style="bold", min_width=names, no_wrap=True)
    table.add_column(min_width=values, no_wrap=not folded)
    for name, value in found:
        table.add_row(Text(name), styled(value))
    _print(table, names + values + 2 * _GAP_LETTERS)


def styled(text: str) -> Text:
    # Text and not markup: a label such as [red] is only a label.
    return Text(text, style=_STYLES.get(text, ""))


def as_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def as_time(at: datetime | None) -> str:
    return NOTHING if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def as_metric(metric: MetricValue) -> str:
    return metric.nonfinite or f"{metric.value:.6g}"
