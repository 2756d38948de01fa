"""One save on its way: its state, the job, what is uploaded of it, the thread that takes it, what save() gives back,
`ckpt.stats`, and how its ranks learn whether it was committed."""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.distributed.ranks import Ranks
from holdfast.errors import CheckpointAborted, HoldfastError, SaveDeclined, SaveFailed
from holdfast.staging import StagedShard
from holdfast.staging.overlap import LateCopy
from holdfast_client.agent.link import HandedSave
from holdfast_client.chunks.transfer import OutgoingChunk
from holdfast_client.client import Client
from holdfast_client.errors import ServiceUnavailable, TransferStopped
from holdfast_client.local.spool import SpoolRecord
from holdfast_protocol.checkpoints import CheckpointView, IndexOrdinals, ShardSummary
from holdfast_protocol.index_documents import Layout, ShardIndex
from holdfast_protocol.states import AbortCause, CheckpointKind, CheckpointState


class SaveState(StrEnum):
    """Where one rank's part of a save is. Only SaveHandle.become() changes it, and what people see follows from it.

    QUEUED -> STAGED -> UPLOADING -> SEALED -> COMMITTED
                 |          ^  ^--------|      LOST from everywhere but COMMITTED
                 v          |
              HASHING -> SPOOLED               with a local tier; also back from UPLOADING and SEALED
    """

    QUEUED = "queued"
    """All ranks have voted for it. Through a staging ring it is staged while it is hashed or uploaded."""
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

    `staged` is done once the state may change again (save() returns no earlier, except with `overlap`). `local` is done
    once it is known whether this rank's part is durable on this node: False without a local tier, or without room in
    it. `committed` is done once the checkpoint can be restored, and holds the service's view of it, or the error.

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
        """The last byte is staged: training goes on. Through a staging ring the save is uploading by then, and may
        have failed."""
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


_ADDING = threading.Lock()


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

    def blocked(self, seconds: float) -> None:
        """From the training thread, or from the pipeline's for a step that waited for a copy."""
        with _ADDING:
            self.blocked_seconds += seconds


class Standstill:
    """How long one save has blocked training; for any thread. Begins when it is made."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._ended_at: float | None = None

    @property
    def seconds(self) -> float:
        """So far, while it lasts: a save through a staging ring may be sealed before training goes on."""
        ended_at = self._ended_at
        return (time.monotonic() if ended_at is None else ended_at) - self._began_at

    def end(self) -> None:
        self._ended_at = time.monotonic()


_RATES_KEPT = 3


class SaveRates:
    """How long this rank's saves took. One thread writes, any reads."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_RATES_KEPT)
        self.bytes: int = 0
        """The size of the last committed save: the next one is about as large."""

    def committed(self, staged_bytes: int, seconds: float) -> None:
        self._rates.append(max(staged_bytes, 1) / max(seconds, 1e-3))
        self.bytes = staged_bytes

    def seconds_for(self, staged_bytes: int) -> float | None:
        """From staged to committed, as slow as the slowest of the last saves; None before the first."""
        return max(staged_bytes, 1) / min(self._rates) if self._rates else None


@dataclass(frozen=True)
class SaveJob:
    """One rank's share of one save, from the training thread to the commit. The staged bytes do not change until it is
    over or in the spool. Bytes for which the staging ring has no room yet are staged while the job goes on."""

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
    """It is not, or no more, in the memory that the next save waits for (`stage_every=`)."""
    record: SpoolRecord | None = None
    """In the spool: its bytes come from the folder, and the staged ones are released."""
    handed: HandedSave | None = None
    """The agent of the node has it too, and finishes it if this process is killed once it is proven."""
    begun_at: float = field(default_factory=time.monotonic)

    @property
    def told(self) -> ShardSummary:
        """The summary for the spool record or the seal, as of now. Raises TornSaveError."""
        late, waited = self.late, 0.0
        if late is not None:
            late.confirm()
            waited = late.waited_seconds
        return self.summary.model_copy(update={"blocked_seconds": self.standstill.seconds + waited})

    @property
    def late(self) -> LateCopy | None:
        """What was still copied when save() returned."""
        return self.staged.late if isinstance(self.staged, StagedShard) else None

    @property
    def is_proven(self) -> bool:
        """`told` cannot raise any more."""
        return self.late is None or self.late.is_proven

    def leave(self) -> None:
        """At the end of the job, on the training thread: the agent of the node goes on with it, unless it is torn."""
        if self.late is not None:
            self.late.check(last=True)
            self.late.tell_proven()
        if self.handed is not None and self.is_proven:
            self.handed.leave()

    @property
    def is_left(self) -> bool:
        """The agent of the node finishes it, though this job ends."""
        return self.handed is not None and self.handed.is_left

    @property
    def total_bytes(self) -> int:
        """Bytes of its chunks, without the documents; 0 if nothing could be staged."""
        return self.staged.total_bytes if isinstance(self.staged, StagedShard) else 0


class ShardChunks:
    """What one rank uploads of a save, in ordinal order: the staged chunks, its index, and rank 0's layout."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._encoded_layout: tuple[str, bytes] | None = None

    def of(self, job: SaveJob, staged: StagedShard) -> Iterator[OutgoingChunk]:
        for ordinal in range(staged.chunk_count):
            yield OutgoingChunk(
                functools.partial(staged.chunk, ordinal),
                digest=staged.digest(ordinal),
                release=functools.partial(staged.done_with, ordinal),
                item_bytes=staged.plan.item_bytes[ordinal],
            )
        for document in self.documents(job):
            yield OutgoingChunk.of(document)

    def documents(self, job: SaveJob) -> list[bytes]:
        """What follows the staged chunks: the index, and on rank 0 the layout."""
        return [job.index.encode(), *([self._layout_bytes(job.layout)] if self._rank == 0 else [])]

    def _layout_bytes(self, layout: Layout) -> bytes:
        """Encoded once per plan, because many saves use it."""
        if self._encoded_layout is None or self._encoded_layout[0] != layout.digest:
            self._encoded_layout = (layout.digest, layout.encode())
        return self._encoded_layout[1]

    def ordinals(self, staged: StagedShard) -> IndexOrdinals:
        """The ordinals of the index and the layout."""
        index = staged.chunk_count
        return IndexOrdinals(shard=index, layout=index + 1 if self._rank == 0 else None)


class SaveThread:
    """A background thread that takes saves in their order, one at a time. The pipeline has one for the upload and one
    for the spool. `work` tells the save's handle of its errors; what it raises is shown, and the thread lives on: the
    next save may go well.

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
            try:
                self._work(job)
            except BaseException:  # raised by code of the script: a log handler, or a callback of a handle's future
                with contextlib.suppress(Exception):  # the hook may be the script's too
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            # A waiting thread must not keep the last save's memory alive.
            del job


SPOOL_READS = 30
"""Tries in a row in which this node's disk does not give a spooled save back: about two minutes. A disk that has died
must not keep all later saves from the store."""


LONG_POLL_SECONDS = 30
_LOOK_SECONDS = 0.1
_ASK_YOURSELF = ""
_OUTCOMES_KEPT = 64


class CommitWatch:
    """Learns what became of a checkpoint after this rank's seal; one rank per host asks (rule waiting-holds-nothing).

    The lowest rank of each host long-polls the service and writes the answer into the job's key-value store. The other
    ranks of that host read it there, or that the leader has begun the step again. A leader that is cut off may write
    nothing for long, so the others also ask the service now and then. Runs on background threads; no collectives.

    `number` is the save's, the same on all ranks. Per save, the leader of a host calls `tell` exactly once."""

    def __init__(self, client: Client, ranks: Ranks, stop: threading.Event) -> None:
        self._client = client
        self._leads = ranks.host_leader == ranks.rank
        self._host = ranks.host_leader
        self._store = ranks.store("outcomes")
        self._stop = stop

    def wait(self, number: int, checkpoint_id: str) -> CheckpointView:
        """The checkpoint once it is no longer uploading. Raises CheckpointAborted if a rank has given the save up, and
        HoldfastError if the service cannot be asked."""
        told = None if self._leads else self._told(number, checkpoint_id)
        return told or self._ask(number, checkpoint_id)

    def tell(self, number: int, outcome: CheckpointView | None) -> None:
        """Hands the outcome to the other ranks of this host; None sends them to ask the service themselves."""
        if self._store is None or not self._leads:
            return
        try:
            self._store.set(self._key(number), outcome.model_dump_json() if outcome else _ASK_YOURSELF)
            # With a local tier the ranks may be some saves apart, but never that many.
            self._store.delete_key(self._key(number - _OUTCOMES_KEPT))
        except RuntimeError:
            return  # the job's store has ended together with the job

    def leave(self, number: int, checkpoint_id: str) -> None:
        """This checkpoint was given up, and the leader begins its step again: waiting ranks must ask the service."""
        if self._store is None or not self._leads:
            return
        try:
            self._store.set(self._key(number, checkpoint_id), _ASK_YOURSELF)
        except RuntimeError:
            return

    def give_up(self, number: int, reason: str, cause: AbortCause | None) -> None:
        """This rank has failed for good. The service aborts the existing checkpoint; a rank that comes to this save
        later would begin it again, and wait for ever. No `cause`: its part stays in the spool, and so must the
        others'."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"given-up/{number}", f"{cause or ''}:{reason}")

    def given_up(self, number: int) -> CheckpointAborted | None:
        """Why this save cannot be completed by this job, or None if no rank has said so."""
        try:
            if self._store is None or not self._store.check([f"given-up/{number}"]):
                return None
            cause, _, reason = self._store.get(f"given-up/{number}").decode().partition(":")
            return CheckpointAborted(reason, context={"cause": AbortCause(cause)} if cause else {})
        except RuntimeError:
            return None  # the job's store has ended together with the job

    def _told(self, number: int, checkpoint_id: str) -> CheckpointView | None:
        """What the leader or, meanwhile, the service says; None if the leader sends this rank to ask."""
        if self._store is None:
            return None
        asked_at = time.monotonic()
        try:
            while not self._store.check([self._key(number)]):
                if self._store.check([self._key(number, checkpoint_id)]):
                    return None
                if time.monotonic() - asked_at >= LONG_POLL_SECONDS:
                    if (view := self._look(checkpoint_id)) is not None:
                        return view
                    asked_at = time.monotonic()
                if self._stop.wait(_LOOK_SECONDS):
                    raise TransferStopped("This job ended before it heard what became of its checkpoint")
            told = self._store.get(self._key(number))
            return CheckpointView.model_validate_json(told) if told else None
        except RuntimeError as error:
            # Rank 0 may have left, and the store with it, because this very checkpoint is committed.
            if (view := self._look(checkpoint_id)) is not None:
                return view
            raise HoldfastError(f"The job's store ended while a checkpoint was still under way ({error})") from error

    def _look(self, checkpoint_id: str) -> CheckpointView | None:
        """The checkpoint, if it is over. The leader may have failed without a word and be at another checkpoint of the
        same step, which needs this rank."""
        try:
            view = self._client.checkpoints.get(checkpoint_id)
        except ServiceUnavailable:
            return None  # the leader or this rank reaches the service later
        return view if view.state is not CheckpointState.UPLOADING else None

    def _ask(self, number: int, checkpoint_id: str) -> CheckpointView:
        while not self._stop.is_set():
            # Asked before the service is: a checkpoint may have committed despite that.
            given_up = self.given_up(number)
            view = self._client.checkpoints.get(checkpoint_id, wait_seconds=None if given_up else LONG_POLL_SECONDS)
            if view.state is not CheckpointState.UPLOADING:
                return view
            if given_up is not None:
                # That rank may have failed before it could tell the service.
                raise given_up
        raise TransferStopped("This job ended before it heard what became of its checkpoint")

    def _key(self, number: int, checkpoint_id: str = "") -> str:
        return f"{self._host}/{number}/{checkpoint_id}"
