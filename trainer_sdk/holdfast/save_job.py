"""One rank's share of one save, on its way from the training thread to the commit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from holdfast.handle import SaveHandle
from holdfast.staging import StagedShard
from holdfast_client.local.spool_record import SpoolRecord
from holdfast_protocol.checkpoints import Component, HealthVerdict, Metrics
from holdfast_protocol.index_documents import Layout, ShardIndex
from holdfast_protocol.states import CheckpointKind


class Standstill:
    """How long training has stood still for one save; for any thread. Begins when it is made."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._ended_at: float | None = None

    @property
    def seconds(self) -> float:
        """So far, while it lasts: a save through a window may be sealed before training goes on."""
        ended_at = self._ended_at
        return (time.monotonic() if ended_at is None else ended_at) - self._began_at

    def end(self) -> None:
        self._ended_at = time.monotonic()


@dataclass(frozen=True)
class SaveJob:
    """Ready to go up. The staged bytes stay as they are until it is over, or kept in the spool; what a window has no
    room for yet is staged while the job goes on."""

    number: int
    """Counts the saves of this job, alike on all ranks."""
    step: int
    kind: CheckpointKind
    staged: StagedShard | BaseException
    """Or why this rank could not stage: the others have voted for this save and must hear that it failed."""
    index: ShardIndex
    layout: Layout
    components: dict[str, Component]
    verdict: HealthVerdict | None
    """Of this rank: None where it has found nothing and has no rule to ask."""
    metrics: Metrics | None
    dropped_components: tuple[str, ...]
    handle: SaveHandle
    standstill: Standstill = field(default_factory=Standstill)
    has_own_memory: bool = False
    """It is not in the memory that the next save waits for (`stage_every=`)."""
    record: SpoolRecord | None = None
    """In the spool: its bytes come from the folder, and what was staged is released."""
    begun_at: float = field(default_factory=time.monotonic)

    @property
    def is_healthy(self) -> bool:
        """As far as this rank can tell; an older service knows no more than that."""
        return self.verdict is None or self.verdict.healthy

    @property
    def total_bytes(self) -> int:
        """Of its chunks, without the documents; 0 where there was nothing to stage."""
        return self.staged.total_bytes if isinstance(self.staged, StagedShard) else 0
