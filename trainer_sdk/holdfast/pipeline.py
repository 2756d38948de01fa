"""The background half of a save: staged -> hashed -> uploaded -> sealed -> committed. HTTP only, no collectives.

One plain thread and the transfer threads, all started at construction: a thread that is first needed while the
interpreter ends could not be started any more. One save at a time; the foreground waits for it or declines.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.commit_watch import CommitWatch
from holdfast.errors import CheckpointAborted, HoldfastError, SaveFailed
from holdfast.handle import SaveHandle
from holdfast.session import ENDS_THE_JOB, Session
from holdfast.staging import StagedShard
from holdfast.stats import SaveStats
from holdfast_client.chunks.uploader import ShardUploader
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.checkpoints import (
    BeginCheckpoint,
    CheckpointView,
    Component,
    FailShard,
    IndexOrdinals,
    Metrics,
    SealShard,
)
from holdfast_protocol.digests import chunk_digest, shard_digest
from holdfast_protocol.index_documents import Layout, ShardIndex
from holdfast_protocol.states import CheckpointKind, CheckpointState

log = logging.getLogger("holdfast")

_FAIL_SHARD_SECONDS = 10.0


@dataclass(frozen=True)
class SaveJob:
    """One rank's share of one save, ready to go up. The staged bytes stay as they are until it is over."""

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
    def __init__(self, session: Session, stats: SaveStats, workers: TransferWorkers) -> None:
        self._session = session
        self._stats = stats
        self._rank = session.ranks.rank
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._uploader: ShardUploader | None = None
        self._encoded_layout: tuple[str, bytes] | None = None
        self._watch = CommitWatch(session.client, session.ranks, self._stop)
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
        self._jobs.put(job)

    def wait_idle(self, timeout_seconds: float | None) -> bool:
        """Waits for the save in flight; false if it takes longer."""
        return self._idle.wait(timeout_seconds)

    def close(self, *, drain_seconds: float) -> bool:
        """Waits for the save in flight, then stops whatever still runs. False if something had to be stopped."""
        drained = self._idle.wait(drain_seconds)
        self._stop.set()
        if (uploader := self._uploader) is not None:
            uploader.stop()
        self._jobs.put(None)
        self._thread.join(timeout=_FAIL_SHARD_SECONDS)
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
        if committed is not None:
            self._report_commit(job, committed)
        # Idle before the handle: who waits for the handle may save again at once.
        self._idle.set()
        if committed is not None:
            job.handle.committed.set_result(committed)
        elif failure is not None:
            job.handle.fail(self._report_failure(job, failure))

    def _save(self, job: SaveJob) -> CheckpointView:
        session, fence = self._session, self._session.fence
        begin = BeginCheckpoint(**fence.model_dump(), step=job.step, world_size=session.ranks.world_size, kind=job.kind)
        checkpoint = session.client.begin(session.run.project, session.run.run, begin)
        try:
            view = self._upload_and_seal(job, checkpoint.id)
        except (CheckpointAborted, *ENDS_THE_JOB):
            raise
        except BaseException as error:
            self._tell_failed(checkpoint.id, error)
            raise
        if view.state is CheckpointState.UPLOADING:
            view = self._watch.wait(job.number, checkpoint.id)
        if view.state is CheckpointState.ABORTED:
            raise CheckpointAborted(view.abort_reason or "It was aborted")
        return view

    def _upload_and_seal(self, job: SaveJob, checkpoint_id: str) -> CheckpointView:
        if isinstance(job.staged, Exception):
            raise job.staged
        fence = self._session.fence
        self._uploader = ShardUploader(self._session.client, checkpoint_id, self._rank, fence, workers=self._workers)
        digests: list[str] = []
        try:
            uploaded = self._uploader.upload(self._hashed(job, job.staged, digests))
        finally:
            self._uploader = None
        self._stats.sent_bytes += uploaded.sent_bytes
        layout_ordinal = len(digests) - 1 if self._rank == 0 else None
        seal = SealShard(
            **fence.model_dump(),
            digest=shard_digest(digests),
            chunks=digests,
            index=IndexOrdinals(shard=job.staged.chunk_count, layout=layout_ordinal),
            logical_bytes=sum(component.logical_bytes for component in job.components.values()),
            components=job.components,
            finite=job.finite,
            metrics=job.metrics,
        )
        return self._session.client.seal(checkpoint_id, self._rank, seal)

    def _hashed(self, job: SaveJob, staged: StagedShard, digests: list[str]) -> Iterator[tuple[str, memoryview]]:
        """The shard's chunks in ordinal order, each with its digest: the staged ones, the index, rank 0's layout."""
        for ordinal in range(staged.chunk_count):
            chunk = staged.chunk(ordinal)
            digests.append(chunk_digest(chunk))
            yield digests[-1], chunk
        documents = [job.index.encode()]
        if self._rank == 0:
            documents.append(self._layout_bytes(job.layout))
        for document in documents:
            digests.append(chunk_digest(document))
            yield digests[-1], memoryview(document)

    def _layout_bytes(self, layout: Layout) -> bytes:
        if self._encoded_layout is None or self._encoded_layout[0] != layout.digest:
            self._encoded_layout = (layout.digest, layout.encode())
        return self._encoded_layout[1]

    def _tell_failed(self, checkpoint_id: str, error: BaseException) -> None:
        """Aborts the checkpoint at once, so that no rank waits for this one. The reaper would, in time."""
        fence = self._session.fence
        failed = FailShard(**fence.model_dump(), reason=f"{type(error).__name__}: {error}"[:4000])
        try:
            self._session.client.seal(checkpoint_id, self._rank, failed)
        except HoldfastError as unheard:
            log.info("the service was not told that rank %d failed: %s", self._rank, unheard)

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
