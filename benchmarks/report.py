"""Rows -> latest.json and the table on the screen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.bars import BARS, bar_of, verdict
from benchmarks.rows import Row

_HEADER = ("row", "value", "bar", "", "peer", "its value", "how")
_LONGEST_CELL = 72


def write_json(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    being_written = path.with_suffix(".tmp")
    being_written.write_text(json.dumps([row.as_json() for row in rows], indent=2) + "\n")
    being_written.replace(path)


def table(rows: Iterable[Row]) -> str:
    """The rows of the bars, and those of a GPU. The figures that they were made of are in the file."""
    lines = [_HEADER, *(_cells(row) for row in rows if row.name in BARS or row.name.startswith("gpu_"))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    how = row.how if len(row.how) <= _LONGEST_CELL else row.how[: _LONGEST_CELL - 1] + "…"
    return (
        row.name,
        f"{_number(row.value)} {row.unit}",
        bar_of(row),
        verdict(row),
        row.peer or "",
        "" if row.peer is None else _number(row.peer_value),
        how,
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
