"""Whether a checkpoint crashes the job: attempt after attempt resumes from it and ends without progress. Pure.

Progress is what tells a bad checkpoint from bad luck: a commit, or more than a few steps beyond the restore point. The
first attempt that made some, looking back from the newest, ends the count, wherever it had begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from holdfast_protocol.states import AttemptOutcome

FEW_STEPS = 10
"""So many steps beyond the restore point are no progress yet: what is wrong in a state may show only after some."""
IN_A_ROW = 2
"""So many checkpoints are quarantined before an attempt makes progress again. A job that crashes from each of them is
at fault itself, and must not eat its way down to its oldest state."""
NOT_THE_CHECKPOINT = frozenset(
    {
        "ConfigurationError",
        "Forbidden",
        "KeyboardInterrupt",
        "LayoutError",
        "NoRestorePoint",
        "NotRestored",
        "RanksDisagree",
        "ServiceUnavailable",
        "StaleAttempt",
        "StateError",
        "StateMismatchError",
        "StoreProblem",
        "StoreRefused",
        "Unauthenticated",
        "UnsupportedStateError",
    }
)
"""Ends that say by their name that the job, a person or the service was at fault."""


@dataclass(frozen=True)
class Tried:
    """An attempt that is over. `point`: the checkpoint that it loaded, or was offered and may have died of loading;
    `point_step` is its step. `called_later`: it was alive when another one took over."""

    number: int
    opened_at: datetime
    point: str | None
    point_step: int | None
    outcome: AttemptOutcome | None
    error_type: str | None = None
    last_step: int | None = None
    committed: bool = False
    rolled_back: bool = False
    called_later: bool = False


@dataclass(frozen=True)
class CrashLoop:
    """`attempts` crashed from one checkpoint, the oldest first; `others`: the points that the job crashed from as well
    since it last made progress."""

    attempts: tuple[int, ...]
    others: frozenset[str]


class _End(Enum):
    PROGRESS = "progress"
    CRASH = "crash"
    SILENCE = "silence"
    NEITHER = "neither"


def crash_loop(
    newest_first: Sequence[Tried], point: str, *, attempts: int, released_at: datetime | None = None
) -> CrashLoop | None:
    """None unless `attempts` of them crashed from `point` without progress. Those that were opened before a person
    released it do not count. A node that was lost tells nothing once: silence counts where it repeats."""
    since_progress: list[tuple[Tried, _End]] = []
    for tried in newest_first:
        if (end := _end_of(tried)) is _End.PROGRESS:
            break
        since_progress.append((tried, end))
    from_point = [
        (tried, end)
        for tried, end in since_progress
        if tried.point == point and (released_at is None or tried.opened_at > released_at)
    ]
    crashed = [tried.number for tried, end in from_point if end is _End.CRASH]
    silent = [tried.number for tried, end in from_point if end is _End.SILENCE]
    if len(silent) > 1:
        crashed += silent
    if len(crashed) < attempts:
        return None
    others = {tried.point for tried, end in since_progress if end is not _End.NEITHER and tried.point is not None}
    return CrashLoop(tuple(sorted(crashed)), frozenset(others - {point}))


def _end_of(tried: Tried) -> _End:
    if tried.outcome is AttemptOutcome.FINISHED or tried.committed:
        return _End.PROGRESS
    if tried.last_step is not None and tried.last_step - (tried.point_step or 0) > FEW_STEPS:
        return _End.PROGRESS
    if tried.rolled_back or tried.called_later or tried.outcome in (None, AttemptOutcome.PREEMPTED):
        return _End.NEITHER
    if tried.outcome is AttemptOutcome.FAILED:
        name = (tried.error_type or "").rpartition(".")[2]
        return _End.NEITHER if name in NOT_THE_CHECKPOINT else _End.CRASH
    # Lost, or taken over without a word: killed, or a node that went away.
    return _End.SILENCE
