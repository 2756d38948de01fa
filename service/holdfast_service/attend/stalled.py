"""Whether an attempt that lives still comes on. Pure.

Only the job's own words are compared, its last heartbeat with its last step: neither a service that was away nor a
clock that jumps makes a stalled job of one that trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from holdfast_protocol.states import Doing

USUAL_STEPS = 20
"""A step may take so many times as long as usual: for an evaluation, a compilation, a slow file system."""
_LONGEST_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class Pace:
    heartbeat_at: datetime | None
    progressed_at: datetime | None
    """The last sign of the training thread; None for a job that does not call step()."""
    doing: Doing | None
    steps_per_second: float | None


def stalled_since(pace: Pace, *, stall_seconds: float) -> datetime | None:
    """Since when it makes no progress; None while nothing is wrong, or nobody knows. Saves and restores have their own
    time-outs."""
    if pace.heartbeat_at is None or pace.progressed_at is None or pace.doing is not Doing.TRAINING:
        return None
    usual = USUAL_STEPS / pace.steps_per_second if pace.steps_per_second else 0.0
    longest = timedelta(seconds=max(stall_seconds, min(usual, _LONGEST_SECONDS)))
    return pace.progressed_at if pace.heartbeat_at - pace.progressed_at > longest else None
