"""What a trial found, as lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tests.jepsen.faults import ALL
from tests.jepsen.journal import Wrong
from tests.jepsen.trial import Outcome

_COLUMNS = ("fault", "times", "recovered", "seconds: median", "max")
_SHOWN = 40


def table(outcome: Outcome) -> Iterator[str]:
    kinds = [kind for kind in ALL if any(one.kind == kind for one in outcome.happened)]
    rows = [_COLUMNS, *(_row(outcome, kind) for kind in kinds), _row(outcome, None)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *cells])
    yield ""
    yield from (f"{times:>11,}  {what}" for what, times in sorted(outcome.verdict.facts.items()))
    yield from (f"NOTE   {note}" for note in outcome.notes[:_SHOWN])
    yield ""
    yield from (f"{outcome.verdict.number(wrong):>11,}  {wrong.value}" for wrong in Wrong)
    findings = outcome.verdict.findings
    yield from (f"FAULT  {wrong.value}: {what}" for wrong, what in findings[:_SHOWN])
    if len(findings) > _SHOWN:
        yield f"FAULT  … and {len(findings) - _SHOWN} more"


def _row(outcome: Outcome, kind: str | None) -> tuple[str, ...]:
    of_kind = [one for one in outcome.happened if kind in (None, one.kind)]
    seconds = [one.seconds for one in of_kind if one.seconds is not None]
    return (
        kind or "all",
        str(len(of_kind)),
        str(len(seconds)),
        f"{statistics.median(seconds):.1f}" if seconds else "",
        f"{max(seconds):.1f}" if seconds else "",
    )
