"""One save on its way: its state, the job, the thread that takes it, what save() gives back, and `ckpt.stats`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.errors import CheckpointAborted, SaveDeclined, SaveFailed
from holdfast.staging import StagedShard
from holdfast_client.errors import ChunkGone, IncompleteCheckpoint
from holdfast_client.local.spool import SpoolRecord
from holdfast_protocol.checkpoints import CheckpointView, ShardSummary
from holdfast_protocol.index_documents import Layout, ShardIndex
from holdfast_protocol.states import AbortCause, CheckpointKind


class SaveState(StrEnum):
    """Where one rank's part of a save is. Only SaveHandle.become() changes it, and what people see follows from it.

    QUEUED -> STAGED -> UPLOADING -> SEALED -> COMMITTED
                 |          ^  ^--------|      LOST from everywhere but COMMITTED
                 v          |
              HASHING -> SPOOLED               with a local tier; also back from UPLOADING and SEALED
    """

    QUEUED = "queued"
    """All ranks have voted for it. Through a window it is staged while it is hashed or uploaded."""
    STAGED = "staged"
    """Whole in host memory, and queued for upload."""
    HASHING = "hashing"
    """With a local tier: hashed, and written to this node's disk."""
    SPOOLED = "spooled"
    """Durable on this node's disk. It waits for its upload, or for the next launch if this job has stopped trying."""
    UPLOADING = "uploading"
    """Begun at the service, hashed and sent. Each retry returns to this state."""
    SEALED = "sealed"
    """This rank's part is complete. The last rank's seal commits."""
    COMMITTED = "committed"
    LOST = "lost"
    """Declined, superseded, failed, or cut off by the end of the job, and not on this node's disk."""


_NEXT: dict[SaveState, frozenset[SaveState]] = {
    SaveState.QUEUED: frozenset({SaveState.STAGED, SaveState.HASHING, SaveState.UPLOADING, SaveState.LOST}),
    SaveState.STAGED: frozenset({SaveState.HASHING, SaveState.UPLOADING, SaveState.LOST}),
    SaveState.HASHING: frozenset({SaveState.SPOOLED, SaveState.UPLOADING, SaveState.LOST}),
    SaveState.SPOOLED: frozenset({SaveState.SPOOLED, SaveState.UPLOADING, SaveState.LOST}),
    SaveState.UPLOADING: frozenset({SaveState.UPLOADING, SaveState.SEALED, SaveState.SPOOLED, SaveState.LOST}),
    SaveState.SEALED: frozenset({SaveState.UPLOADING, SaveState.COMMITTED, SaveState.SPOOLED, SaveState.LOST}),
    SaveState.COMMITTED: frozenset(),
    SaveState.LOST: frozenset(),
}


@dataclass(eq=False)
class SaveHandle:
    """The state and the futures of one save; save() returns it. Background threads resolve them.

    `staged` is done once the state may change again (save() returns no earlier). `local` is done once it is known
    whether this rank's part is durable on this node: False without a local tier, or without room in it. `committed` is
    done once the checkpoint can be restored, and holds the service's view of it, or the error.

    `diverged` says why no job should go on from this state; None if it is healthy. It is known when save() returns, and
    the same on every rank.

    The futures have `result(timeout)`, `exception(timeout)` and `done()` as in concurrent.futures. Cancelling does
    nothing.
    """

    step: int
    diverged: str | None = None
    staged: Future[None] = field(default_factory=Future, repr=False)
    local: Future[bool] = field(default_factory=Future, repr=False)
    committed: Future[CheckpointView] = field(default_factory=Future, repr=False)
    _state: SaveState = field(default=SaveState.QUEUED, init=False, repr=False)
    _over: bool = field(default=False, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        # Running from the start, so that a script cannot cancel what other ranks count on.
        for future in (self.staged, self.local, self.committed):
            future.set_running_or_notify_cancel()

    @property
    def declined(self) -> bool:
        """Whether all ranks have skipped this save: known when save() returns, and the same on every rank. Any other
        failure reaches each rank at its own time, so no collective may depend on it."""
        return self.committed.done() and isinstance(self.committed.exception(), SaveDeclined)

    @property
    def state(self) -> SaveState:
        return self._state

    def become(self, state: SaveState, *, over: bool = False) -> bool:
        """The one place that changes the state; `over`: for good, as COMMITTED and LOST always are. Returns False if
        the save is over already: the job may have ended while a thread was still at it. Raises ValueError for a state
        that cannot follow."""
        with self._lock:
            if self._over:
                return False
            if state not in _NEXT[self._state]:
                raise ValueError(f"step {self.step} is {self._state}, and cannot become {state}")
            self._state = state
            self._over = over or not _NEXT[state]
        if state is SaveState.STAGED:
            self.mark_staged()
        if state is SaveState.SPOOLED:
            self.mark_local(kept=True)
        return True

    def mark_staged(self) -> None:
        """The last byte is staged: training goes on. With a staging window the save is uploading by then, and may have
        failed."""
        with suppress(InvalidStateError):
            self.staged.set_result(None)

    def mark_local(self, *, kept: bool) -> None:
        with suppress(InvalidStateError):
            self.local.set_result(kept)

    def mark_committed(self, view: CheckpointView) -> None:
        if self.become(SaveState.COMMITTED):
            self.committed.set_result(view)

    def fail(self, error: BaseException, state: SaveState = SaveState.LOST) -> None:
        """The save is over without a commit. All futures that are not done yet end with `error`."""
        if self.become(state, over=True):
            for future in (self.staged, self.local, self.committed):
                with suppress(InvalidStateError):
                    future.set_exception(error)


@dataclass
class SaveStats:
    """What a Checkpointer has done so far; `ckpt.stats`. Counts are of this process; commits through `ckpt.writer()`
    count on rank 0. `blocked_seconds`: how long saves have blocked the training thread."""

    committed: int = 0
    failed: int = 0
    declined: int = 0
    """Skipped by all ranks together, because an earlier save was still in flight."""
    diverged: int = 0
    """Staged with the verdict that no job should go on from them (SaveHandle.diverged)."""
    superseded: int = 0
    """Given up for a newer state, because there was no time for both."""
    spooled: int = 0
    """Durable on this node's disk before their upload; only with a local tier."""
    committed_late: int = 0
    """After service or store had been unavailable, or left in the spool by an earlier attempt and committed by this
   one."""
    sent_bytes: int = 0
    """On the wire."""
    sent_chunk_bytes: int = 0
    """The bytes of the sent chunks before compression."""
    blocked_seconds: float = 0.0
    last_committed_step: int | None = None
    last_failure: SaveFailed | None = None


class Standstill:
    """How long one save has blocked training; for any thread. Begins when it is made."""

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
    """One rank's share of one save, from the training thread to the commit. The staged bytes do not change until it is
    over or in the spool. Bytes for which the window has no room yet are staged while the job goes on."""

    number: int
    """The save's number in this job, the same on all ranks."""
    step: int
    kind: CheckpointKind
    staged: StagedShard | BaseException
    """Or why this rank could not stage: the others have voted for this save and must hear that it failed."""
    index: ShardIndex
    layout: Layout
    summary: ShardSummary
    """Without the values that are measured later; `told` has those too."""
    handle: SaveHandle
    standstill: Standstill = field(default_factory=Standstill)
    has_own_memory: bool = False
    """It is not in the memory that the next save waits for (`stage_every=`)."""
    record: SpoolRecord | None = None
    """In the spool: its bytes come from the folder, and the staged ones are released."""
    begun_at: float = field(default_factory=time.monotonic)

    @property
    def told(self) -> ShardSummary:
        """The summary for the spool record or the seal, as of now."""
        return self.summary.model_copy(update={"blocked_seconds": self.standstill.seconds})

    @property
    def total_bytes(self) -> int:
        """Bytes of its chunks, without the documents; 0 if nothing could be staged."""
        return self.staged.total_bytes if isinstance(self.staged, StagedShard) else 0


class SaveThread:
    """A background thread that takes saves in their order, one at a time. The pipeline has one for the upload and one
    for the spool. `work` must catch its own exceptions: the next save may go well.

    It is started at construction, because no thread can start once the interpreter ends."""

    def __init__(self, name: str, work: Callable[[SaveJob], None]) -> None:
        self._work = work
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: SaveJob) -> None:
        """Queues the job, from any thread."""
        self._jobs.put(job)

    def end(self) -> None:
        """Ends the thread after the queued saves. Does not wait."""
        self._jobs.put(None)

    def join(self, timeout_seconds: float) -> None:
        """Waits for the end; a thread that takes longer is left behind, and does not keep the process alive."""
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work(job)
            # A waiting thread must not keep the last save's memory alive.
            del job


BEGINS = 3
"""Limits all tries together: if a rank is dead for good, the others must not wait for it for ever."""


BEGIN_ANEW_AFTER = frozenset({AbortCause.SILENT, AbortCause.CHUNK_GONE})
"""Outages cause these aborts. The other causes mean that a rank does not want the checkpoint or cannot complete it."""


def worth_another_begin(error: BaseException) -> bool:
    """Whether a save that did not commit can still be committed by this job. Pure.

    The service aborts a checkpoint after long silence, because it cannot tell a dead job from one that is cut off. A
    living job still holds the staged bytes. Every rank that hears of the abort begins the same step again, and gets the
    same new checkpoint (rule one-checkpoint-per-step); chunks that had arrived are not sent again."""
    if isinstance(error, ChunkGone | IncompleteCheckpoint):
        # This rank's seal has found that a chunk of any rank was lost. It is sent again.
        return True
    return isinstance(error, CheckpointAborted) and error.context.get("cause") in BEGIN_ANEW_AFTER
