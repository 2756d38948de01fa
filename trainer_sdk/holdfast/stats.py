"""What a Checkpointer has done so far; `ckpt.stats`. Written by the save's two halves, read by anyone."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import SaveFailed


@dataclass
class SaveStats:
    """Counts are of this process; what a `ckpt.writer()` commits counts on rank 0. `blocked_seconds` is what saving has
    cost the training thread."""

    committed: int = 0
    failed: int = 0
    declined: int = 0
    """Left out by all ranks together, for an earlier save was still in flight."""
    diverged: int = 0
    """Staged with a verdict that nobody should go on from them (SaveHandle.diverged)."""
    superseded: int = 0
    """Given up for a newer state, when there was no time for both."""
    spooled: int = 0
    """Durable on this node's disk before they went up; only with a local tier."""
    committed_late: int = 0
    """After service or store had been away, or left in the spool by an earlier attempt and committed by this one."""
    sent_bytes: int = 0
    """On the wire."""
    sent_chunk_bytes: int = 0
    """Of the chunks that were sent, before they were compressed; without compression the same."""
    blocked_seconds: float = 0.0
    last_committed_step: int | None = None
    last_failure: SaveFailed | None = None
