"""Giving a checkpoint up: by its job, by a rank that failed, by a newer attempt, by the reaper.

The row must be locked by the caller; whoever aborts tells the notifier after the commit.
"""

from __future__ import annotations

from datetime import datetime

from holdfast_protocol.states import AbortCause, CheckpointState
from holdfast_service.catalog.tables import Checkpoint
from holdfast_service.catalog.transitions import may_become


def abort(checkpoint: Checkpoint, reason: str, now: datetime, *, cause: AbortCause, rank: int | None = None) -> None:
    """`rank` is the one to blame, if it is known. The same step can be begun anew afterwards (protocol rule 6)."""
    if not may_become(CheckpointState(checkpoint.state), CheckpointState.ABORTED):
        raise ValueError(f"a checkpoint that is {checkpoint.state} cannot be aborted")
    checkpoint.state = CheckpointState.ABORTED
    checkpoint.aborted_at = now
    checkpoint.abort_reason = reason
    checkpoint.abort_rank = rank
    checkpoint.abort_cause = cause
    checkpoint.version += 1
