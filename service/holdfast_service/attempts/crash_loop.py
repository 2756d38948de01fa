"""Whether a checkpoint crashes the job: attempt after attempt resumes from it and ends without progress. Pure.

Progress is what tells a bad checkpoint from bad luck: a commit that is not diverged, or more than a few steps beyond
the restore point. The first attempt that made some, looking back from the newest, ends the count, wherever it began.
"""

from __future__ import annotations

import builtins
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
_OURS = frozenset({"holdfast", "holdfast_client", "holdfast_protocol"})
_DAMAGED = frozenset(
    {
        "ChecksumMismatch",
        "ChunkCorrupt",
        "ChunkLost",
        "DecodeError",
        "DocumentError",
        "IntegrityError",
        "TreeFormatError",
    }
)
"""Of our own errors these alone can be the checkpoint's: its bytes are wrong. All others say by their name that the
job, a person, the service, the store or the network was at fault, whatever classes are still to come."""
_RANK_LOST = "holdfast.errors.RankLost"
_NOT_THE_CHECKPOINT = frozenset(
    {
        "ImportError",
        "KeyboardInterrupt",
        "MemoryError",
        "ModuleNotFoundError",
        "SystemExit",
        "argparse.ArgumentError",
        "socket.gaierror",
        *(name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)),
    }
)
"""A job that is set up wrongly, or stopped, or its machine, files and network: an earlier checkpoint meets the same."""
_NOT_THE_CHECKPOINT_IN_ANY_PACKAGE = (
    "ConnectError",
    "ConnectionError",
    "HTTPError",
    "OutOfMemoryError",
    "SSLError",
    "Timeout",
    "TimeoutError",
    "URLError",
)
"""How such errors are called, whoever raises them: requests, httpx, botocore, huggingface_hub, torch."""


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
    # Lost, or taken over without a word: killed, or a node that went away.
    return _end_by(tried.error_type) if tried.outcome is AttemptOutcome.FAILED else _End.SILENCE


def _end_by(error_type: str | None) -> _End:
    """Of a job that failed by this error. Without one it has only heard that another rank is gone, as with the errors
    of a torch collective: what became of that rank nobody knows."""
    if error_type is None or error_type == _RANK_LOST:
        return _End.SILENCE
    module, _, name = error_type.rpartition(".")
    package = module.partition(".")[0]
    if package in _OURS:
        return _End.CRASH if name in _DAMAGED else _End.NEITHER
    if module == "torch.distributed" and name.startswith("Dist") and name.endswith("Error"):
        return _End.SILENCE
    elsewhere = error_type in _NOT_THE_CHECKPOINT or name.endswith(_NOT_THE_CHECKPOINT_IN_ANY_PACKAGE)
    return _End.NEITHER if elsewhere else _End.CRASH
