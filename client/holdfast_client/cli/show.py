"""How results reach the screen: JSON for programs, or a table that fits 80 columns. Nothing else prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast_protocol.checkpoints import MetricValue

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


def _print(table: Table) -> None:
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(table)
    # rich fills every line with blanks, which are in the way of grep and of whoever pastes it.
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def show_json(value: BaseModel | Iterable[BaseModel]) -> None:
    """One object, or an array of all items of a list."""
    if isinstance(value, BaseModel):
        document: object = value.model_dump(mode="json")
    else:
        document = [item.model_dump(mode="json") for item in value]
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, nothing: str) -> None:
    """Columns that begin with `>` are numbers and stand at the right. `nothing` is said where there are no rows."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(styled(cell) for cell in row))
    if table.row_count:
        _print(table)
    else:
        sys.stderr.write(nothing + "\n")


def show_facts(facts: Iterable[tuple[str, str]]) -> None:
    """One fact a line: its name, and its value folded beside it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(name), styled(value))
    _print(table)


def show_line(text: str) -> None:
    """Plain text on stdout."""
    sys.stdout.write(text + "\n")


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
    return NOTHING if at is None else at.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def as_metric(metric: MetricValue) -> str:
    return metric.nonfinite or f"{metric.value:.6g}"
