"""What a chaos run found, as lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tests.chaos_run.faults import ALL
from tests.chaos_run.findings import Wrong
from tests.chaos_run.resized import KIND as RESIZED
from tests.chaos_run.run import Outcome

_COLUMNS = ("fault", "times", "recovered", "seconds: median", "max", "steps lost: max")
_NOBODY = "ended by itself"


def table(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    rows = [(*_COLUMNS, Wrong.BYTES.value, Wrong.HANG.value, Wrong.LOST_COMMIT.value)]
    for kind in ALL:
        of_kind = [one for one in outcome.happened if one.kind == kind]
        fixed = [one.seconds for one in of_kind if one.is_mended]
        rows.append(_row(outcome, kind, len(of_kind), fixed, verdict.lost.get(kind, []), kind))
    for kind, name in ((RESIZED, RESIZED), ("", _NOBODY)):
        lost = verdict.lost.get(kind, [])
        if lost or verdict.count(Wrong.BYTES, kind):
            rows.append(_row(outcome, name, len(lost), [], lost, kind))
    fixed = [one.seconds for one in outcome.happened if one.is_mended]
    lost = [steps for each in verdict.lost.values() for steps in each]
    rows.append(_row(outcome, "all", len(outcome.happened), fixed, lost, None))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
    yield ""
    yield from (f"{count:>7,}  {what}" for what, count in sorted(verdict.facts.items()))
    yield from verdict.notes
    yield from (f"{verdict.count(wrong):>7,}  {wrong.value}" for wrong in Wrong)
    yield from (f"FAULT  {one.wrong}{f' ({one.kind})' if one.kind else ''}: {one.text}" for one in verdict.findings)


def _row(
    outcome: Outcome, name: str, times: int, fixed: Sequence[float], lost: Sequence[int], kind: str | None
) -> tuple[str, ...]:
    return (
        name,
        str(times),
        str(len(fixed)) if fixed or not times else "",
        f"{statistics.median(fixed):.1f}" if fixed else "",
        f"{max(fixed):.1f}" if fixed else "",
        str(max(lost)) if lost else "-",
        *(str(outcome.verdict.count(wrong, kind)) for wrong in (Wrong.BYTES, Wrong.HANG, Wrong.LOST_COMMIT)),
    )
