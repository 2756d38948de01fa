"""The background half of a save: staged -> hashed -> uploaded -> sealed -> committed. HTTP only, no collectives.

One plain thread and the transfer threads, all started at construction: a thread that is first needed while the
interpreter ends could not be started any more. One save at a time; the foreground waits for it or declines.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.begin_anew import BEGINS, worth_another_begin
from holdfast.commit_watch import CommitWatch
from holdfast.errors import CheckpointAborted, HoldfastError, SaveFailed
from holdfast.handle import SaveHandle
from holdfast.session import ENDS_THE_JOB, Session
from holdfast.staging import StagedShard
from holdfast.stats import SaveStats
from holdfast_client.chunks.outgoing import OutgoingChunk
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.checkpoints import CheckpointView, Component, Metrics
from holdfast_protocol.index_documents import Layout, ShardIndex
from holdfast_protocol.states import CheckpointKind, CheckpointState

log = logging.getLogger("holdfast")

_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class SaveJob:
    """One rank's share of one save, ready to go up. The staged bytes stay as they are until it is over; what a window
    has no room for yet is staged while the job goes on."""

    number: int
    """Counts the saves of this job, alike on all ranks."""
    step: int
    kind: CheckpointKind
    staged: StagedShard | Exception
    """Or why this rank could not stage: the others have voted for this save and must hear that it failed."""
    index: ShardIndex
    layout: Layout
    components: dict[str, Component]
    finite: bool
    metrics: Metrics | None
    handle: SaveHandle
    begun_at: float = field(default_factory=time.monotonic)


class SavePipeline:
    def __init__(self, session: Session, stats: SaveStats, workers: TransferWorkers, *, retry_seconds: float) -> None:
        """`retry_seconds`: how long a staged save outlives an absent service or store."""
        self._session = session
        self._stats = stats
        self._rank = session.ranks.rank
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._writer: ShardWriter | None = None
        self._staged: StagedShard | None = None
        self._encoded_layout: tuple[str, bytes] | None = None
        # Nobody waits for what is staged whole; for the next chunk of a window training does.
        self._patient_client = session.client.with_patience(retry_seconds, self._stop)
        self._prompt_client = session.client.with_patience(session.client.settings.retry_seconds, self._stop)
        self._watch = CommitWatch(self._patient_client, session.ranks, self._stop)
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._workers = workers
        self._thread = threading.Thread(target=self._work, name="holdfast-save", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """A save is in flight on this rank."""
        return not self._idle.is_set()

    def start(self, job: SaveJob) -> None:
        """Takes the job over; its handle says how it ends. Only while not busy."""
        self._idle.clear()
        self._staged = job.staged if isinstance(job.staged, StagedShard) else None
        self._jobs.put(job)

    def wait_idle(self, timeout_seconds: float | None) -> bool:
        """Waits for the save in flight; false if it takes longer."""
        return self._idle.wait(timeout_seconds)

    def close(self, *, drain_seconds: float) -> bool:
        """Waits for the save in flight, then stops whatever still runs. False if something had to be stopped."""
        drained = self._idle.wait(drain_seconds)
        self._stop.set()
        if (writer := self._writer) is not None:
            writer.stop()
        if (staged := self._staged) is not None:
            staged.give_up()
        self._jobs.put(None)
        self._thread.join(timeout=_STOP_SECONDS)
        return drained

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job

    def _run(self, job: SaveJob) -> None:
        committed: CheckpointView | None = None
        failure: BaseException | None = None
        try:
            committed = self._save(job)
        except BaseException as error:  # this thread must live on: the next save may go well
            failure = error
        finally:
            self._watch.tell(job.number, committed)
            if isinstance(job.staged, StagedShard):
                job.staged.release()
            self._staged = None
        if committed is not None:
            self._report_commit(job, committed)
        # Idle before the handle: who waits for the handle may save again at once.
        self._idle.set()
        if committed is not None:
            job.handle.committed.set_result(committed)
        elif failure is not None:
            job.handle.fail(self._report_failure(job, failure))

    def _save(self, job: SaveJob) -> CheckpointView:
        """Begins anew where the service has given the checkpoint up and the bytes are still here."""
        for begins_left in reversed(range(BEGINS)):
            try:
                return self._save_once(job)
            except HoldfastError as error:
                if not begins_left or self._writer is None or not self._may_begin_anew(job, error):
                    raise
                self._watch.leave(job.number, self._writer.checkpoint_id)
                if self._rank == 0:
                    log.warning("step %d is begun anew: %s", job.step, error)
        raise AssertionError("the last begin returns or raises")

    def _may_begin_anew(self, job: SaveJob, error: HoldfastError) -> bool:
        staged = job.staged
        return isinstance(staged, StagedShard) and staged.can_repeat and worth_another_begin(error)

    def _save_once(self, job: SaveJob) -> CheckpointView:
        waits = isinstance(job.staged, StagedShard) and not job.staged.can_repeat
        client = self._prompt_client if waits else self._patient_client
        self._writer = self._session.begin_shard(job.step, job.kind, self._workers, client)
        try:
            view = self._write(self._writer, job)
        except BaseException as error:
            if isinstance(job.staged, StagedShard):
                job.staged.give_up()  # before the service is told, which may take a while: training may be waiting
            if not isinstance(error, (CheckpointAborted, *ENDS_THE_JOB)):
                self._writer.fail(error)
            raise
        if view.state is CheckpointState.UPLOADING:
            view = self._watch.wait(job.number, self._writer.checkpoint_id)
        if view.state is CheckpointState.ABORTED:
            raise CheckpointAborted(view.abort_reason or "It was aborted", context={"cause": view.abort_cause})
        return view

    def _write(self, writer: ShardWriter, job: SaveJob) -> CheckpointView:
        if isinstance(job.staged, Exception):
            raise job.staged
        writer.upload(self._chunks(job, job.staged))
        job.staged.hashed(writer.digests)
        self._stats.sent_bytes += writer.sent_bytes
        index = job.staged.chunk_count
        return writer.seal(
            index=index,
            layout=index + 1 if self._rank == 0 else None,
            components=job.components,
            finite=job.finite,
            metrics=job.metrics,
        )

    def _chunks(self, job: SaveJob, staged: StagedShard) -> Iterator[OutgoingChunk]:
        """The shard's chunks in ordinal order: the staged ones, the index, rank 0's layout."""
        for ordinal in range(staged.chunk_count):
            yield OutgoingChunk(
                functools.partial(staged.chunk, ordinal),
                digest=staged.digest(ordinal),
                release=functools.partial(staged.done_with, ordinal),
            )
        yield OutgoingChunk.of(job.index.encode())
        if self._rank == 0:
            yield OutgoingChunk.of(self._layout_bytes(job.layout))

    def _layout_bytes(self, layout: Layout) -> bytes:
        if self._encoded_layout is None or self._encoded_layout[0] != layout.digest:
            self._encoded_layout = (layout.digest, layout.encode())
        return self._encoded_layout[1]

    def _report_commit(self, job: SaveJob, view: CheckpointView) -> None:
        self._stats.committed += 1
        self._stats.last_committed_step = job.step
        if self._rank == 0:
            log.info(
                "committed %s at step %d: %s of state, %s sent, in %.1f s",
                self._session.run,
                job.step,
                readable_bytes(view.logical_bytes),
                readable_bytes(view.uploaded_bytes),
                time.monotonic() - job.begun_at,
            )

    def _report_failure(self, job: SaveJob, failure: BaseException) -> SaveFailed:
        self._stats.failed += 1
        self._session.note(failure)
        failed = SaveFailed(f"The checkpoint of step {job.step} was not committed. {failure}")
        failed.__cause__ = failure
        self._stats.last_failure = failed
        # What another rank did to this checkpoint is told by that rank and, for all the others, by rank 0.
        if self._rank == 0 or not isinstance(failure, CheckpointAborted):
            log.warning("%s Training goes on.", failed)
        return failed


def readable_bytes(count: int) -> str:
    """`1.5 GB`; powers of 1000, as disks and networks are sold."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"
