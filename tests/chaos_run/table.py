"""What a chaos run found, as lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tests.chaos_run.faults import ALL
from tests.chaos_run.run import Outcome

_COLUMNS = ("fault", "times", "recovered", "seconds: median", "max")


def table(outcome: Outcome) -> Iterator[str]:
    rows = [_COLUMNS]
    for kind in ALL:
        of_kind = [one for one in outcome.happened if one.kind == kind]
        mended = [one.seconds for one in of_kind if one.is_mended]
        median, longest = (f"{statistics.median(mended):.1f}", f"{max(mended):.1f}") if mended else ("", "")
        rows.append((kind, str(len(of_kind)), str(len(mended)), median, longest))
    mended_all = [one.seconds for one in outcome.happened if one.is_mended]
    if mended_all:
        rows.append(
            (
                "all",
                str(len(outcome.happened)),
                str(len(mended_all)),
                f"{statistics.median(mended_all):.1f}",
                f"{max(mended_all):.1f}",
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
    verdict = outcome.verdict
    yield ""
    for by, lost in sorted(verdict.lost.items()):
        yield f"steps trained again after: {by}: {len(lost)} launches, {max(lost)} at most, {sum(lost)} in all"
    for what, count in sorted(verdict.facts.items()):
        yield f"{what}: {count:,}"
    yield f"wrong bytes: {len(verdict.wrong_bytes)}"
    yield f"hangs: {len(verdict.hangs)}"
    yield f"lost commits: {len(verdict.lost_commits)}"
    yield from (f"FAULT  {fault}" for fault in verdict.faults)
