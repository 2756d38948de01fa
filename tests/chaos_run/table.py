"""What a chaos run found, as lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tests.chaos_run.faults import ALL, OF_AGENTS
from tests.chaos_run.findings import Recovery, Wrong
from tests.chaos_run.resized import KIND as RESIZED
from tests.chaos_run.run import Outcome

_COLUMNS = ("fault", "times", "recovered", "seconds: median", "max", "steps lost: max")
_NOBODY = "ended by itself"
_SOURCES = ("own agent", "other agents", "local disk", "store")
_RECOVERY_COLUMNS = (
    *("launches ended by", "times", "steps lost: median", "max", "saved: max", "committed: max"),
    *("first step again, s: median", "max", "KiB read: own agent", *_SOURCES[1:]),
)
"""`saved`: save() had returned for these on all ranks. KiB: by the rank that was killed alone, else by all ranks."""


def table(outcome: Outcome) -> Iterator[str]:
    verdict = outcome.verdict
    rows = [(*_COLUMNS, Wrong.BYTES.value, Wrong.HANG.value, Wrong.LOST_COMMIT.value)]
    for kind in ALL | OF_AGENTS:
        of_kind = [one for one in outcome.happened if one.kind == kind]
        if kind in OF_AGENTS and not of_kind:
            continue
        fixed = [one.seconds for one in of_kind if one.is_mended]
        rows.append(_row(outcome, kind, len(of_kind), fixed, verdict.lost.get(kind, []), kind))
    for kind, name in ((RESIZED, RESIZED), ("", _NOBODY)):
        lost = verdict.lost.get(kind, [])
        if lost or verdict.count(Wrong.BYTES, kind):
            rows.append(_row(outcome, name, len(lost), [], lost, kind))
    fixed = [one.seconds for one in outcome.happened if one.is_mended]
    lost = [steps for each in verdict.lost.values() for steps in each]
    rows.append(_row(outcome, "all", len(outcome.happened), fixed, lost, None))
    yield from _aligned(rows)
    yield ""
    ended = [kind for kind in ALL | OF_AGENTS if any(one.kind == kind for one in verdict.recoveries)]
    if ended:
        yield from _aligned([_RECOVERY_COLUMNS, *(_recovery_row(kind, verdict.recoveries) for kind in ended)])
        yield ""
    yield from (f"{count:>7,}  {what}" for what, count in sorted(verdict.facts.items()))
    yield from verdict.notes
    yield from (f"{verdict.count(wrong):>7,}  {wrong.value}" for wrong in Wrong)
    yield from (f"FAULT  {one.wrong}{f' ({one.kind})' if one.kind else ''}: {one.text}" for one in verdict.findings)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *cells])


def _recovery_row(kind: str, recoveries: Sequence[Recovery]) -> tuple[str, ...]:
    of_kind = [one for one in recoveries if one.kind == kind]
    seconds = [one.seconds for one in of_kind if one.seconds is not None]
    read = [sum(one.read.get(source, 0) for one in of_kind) / 1024 for source in _SOURCES]
    return (
        kind,
        str(len(of_kind)),
        f"{statistics.median(one.lost for one in of_kind):g}",
        str(max(one.lost for one in of_kind)),
        str(max(one.saved_lost for one in of_kind)),
        str(max(one.committed_lost for one in of_kind)),
        *((f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("-", "-")),
        *(f"{kib:,.0f}" for kib in read),
    )


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
