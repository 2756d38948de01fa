"""The background half of a save: staged -> hashed -> uploaded -> sealed -> committed. HTTP only, no collectives.

    training thread -> [slab] -> upload thread: hashed, sent, sealed, committed -> slab free
    with a local tier:
    training thread -> [slab] -> spool thread: hashed, on this node's disk -> slab free
                                  -> upload thread, in order, from the disk, until it is committed or the job ends
    with a node agent:
    training thread -> [slab, shared] -> handed over -> upload thread follows what the agent does from the slab

One slab is in use at a time; the foreground waits for it or declines. `SaveReports` tells people how each save ended.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence

from holdfast.errors import ENDS_THE_JOB, CheckpointAborted, HoldfastError, SaveFailed, SaveSpooled, SaveSuperseded
from holdfast.local.adoption import Verdict, verdict_of
from holdfast.local.keep import keep_save
from holdfast.progress import Phase, ProgressBoard, readable_bytes
from holdfast.save.agent_handover import AgentHandover
from holdfast.save.job import (
    SPOOL_READS,
    CommitWatch,
    SaveJob,
    SaveRates,
    SaveState,
    SaveStats,
    SaveThread,
    ShardChunks,
)
from holdfast.session.session import Session
from holdfast.staging import StagedShard
from holdfast.staging.overlap import TornSaveError
from holdfast_client.agent.link import AgentGone, HandedSave, NodeAgent
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.errors import (
    CheckpointConflict,
    InvalidRequest,
    LocalReadFailed,
    ServiceUnavailable,
    TransferStopped,
)
from holdfast_client.host_calls import HostCalls
from holdfast_client.local.push import push_shard
from holdfast_client.local.tier import LocalTier, NoRoom
from holdfast_client.shard_writer import BEGINS, ShardWriter, worth_another_begin
from holdfast_client.transport import Backoff, check_stop
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import AbortCause, CheckpointState

log = logging.getLogger("holdfast")

STOP_SECONDS = 10.0
"""How long the end of a job waits for threads that were told to stop."""


class SavePipeline:
    def __init__(
        self,
        session: Session,
        stats: SaveStats,
        workers: TransferWorkers,
        *,
        host_calls: HostCalls | None,
        retry_seconds: float,
        progress: ProgressBoard,
        tier: LocalTier | None = None,
        agent: NodeAgent | None = None,
    ) -> None:
        """Closes `host_calls` at its end; None: this rank calls alone. `retry_seconds`: how long a staged save is
        retried while service or store are unavailable. With a local tier it is retried until the job ends, or until the
        disk fails to give it back SPOOL_READS times in a row."""
        self._session = session
        self._rank = session.ranks.rank
        self.host_calls = host_calls
        self._tier = tier
        self._progress = progress
        self._stats = stats
        self._reports = SaveReports(session, stats, tier)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._in_flight: dict[int, SaveJob] = {}
        self._left: list[SaveJob] = []
        """The saves that this job has stopped trying to commit, without a failure for good."""
        self._superseded: dict[int, str] = {}
        self._unread = 0
        """The tries in a row in which the spool did not give this save back."""
        self.rates = SaveRates()
        self.last_committed_number = 0
        self._idle = threading.Event()
        self._idle.set()
        self._free = threading.Event()
        self._free.set()
        self._writer: ShardWriter | None = None
        self._staged: StagedShard | None = None
        shard_chunks = ShardChunks(self._rank)
        self._chunks, self._documents = shard_chunks.of, shard_chunks.ordinals
        agents_retry_seconds = retry_seconds if tier is None else session.client.settings.retry_seconds
        self._handover = None if agent is None else AgentHandover(agent, session, shard_chunks, agents_retry_seconds)
        # Training waits for the next chunk of a window, but not for a state that is staged whole.
        self._retrying_client = session.client.with_retry_deadline(retry_seconds, self._stop)
        self._prompt_client = session.client.with_retry_deadline(session.client.settings.retry_seconds, self._stop)
        self._watch = CommitWatch(self._retrying_client, session.ranks, self._stop)
        self._workers = workers
        self._uploads = SaveThread("holdfast-save", self._run)
        self._keeps = None if tier is None else SaveThread("holdfast-spool", self._keep)

    @property
    def busy(self) -> bool:
        """The staging memory of this rank is in use."""
        return not self._free.is_set()

    @property
    def in_flight(self) -> list[SaveJob]:
        """The saves that are not over, in their order."""
        with self._lock:
            return list(self._in_flight.values())

    def hand_over(self, job: SaveJob) -> SaveJob:
        """With a node agent: the job as the agent has taken it. Once it is proven it outlives this process. Raises
        TornSaveError."""
        if self._handover is None:
            return job
        try:
            return dataclasses.replace(job, handed=self._handover.hand_over(job))
        except TornSaveError:
            raise
        except Exception as error:  # all ranks have voted for this save; the upload meets the error too, and tells them
            log.warning("step %d is not handed to the agent of this node: %s", job.step, error)
            return job

    def start(self, job: SaveJob) -> None:
        """Takes the job over; its handle says how it ends. Call it only while not busy, or with memory of the job's
        own."""
        with self._lock:
            self._in_flight[job.number] = job
            self._idle.clear()
        if not job.has_own_memory:
            self._free.clear()
            self._staged = job.staged if isinstance(job.staged, StagedShard) else None
        if self._keeps is None:
            job.handle.mark_local(kept=False)
        (self._keeps or self._uploads).put(job)

    def wait_free(self, timeout_seconds: float | None) -> bool:
        """Waits until the next save can be staged; False if that takes longer."""
        return self._free.wait(timeout_seconds)

    def wait_idle(self, timeout_seconds: float | None) -> bool:
        """Waits until every save is over; False if that takes longer."""
        return self._idle.wait(timeout_seconds)

    def supersede(self, reason: str) -> None:
        """Gives up the saves in flight, on every rank alike, for a newer state: closes their sockets, ends their
        readers, and aborts them at the service. `wait_free` then says when the memory is free. Spooled saves stay in
        the spool. A save that has just been committed stays committed. Collective."""
        with self._lock:
            given_up = list(self._in_flight.values())
            self._superseded.update({job.number: reason for job in given_up})
            writer = self._writer
        # No rank may hear of the abort before it knows why: it would take its spooled save for dropped.
        self._session.ranks.gather(None)
        if not given_up:
            return
        if writer is not None:
            writer.stop()
        if self.host_calls is not None:
            self.host_calls.flush()
        self._session.client.transfers.cut()
        if self._rank == 0:
            self._abort_first(given_up, reason)

    def _abort_first(self, jobs: Sequence[SaveJob], reason: str) -> None:
        """Ranks that have sealed wait at the service, and hear of the abort there. They wait for the first save that is
        not committed, which this rank may not have begun yet: its disk may still be writing."""
        for job in jobs:
            try:
                self._session.shard_writer(job.step, job.kind, self._workers, save_number=job.number).abort(reason)
            except CheckpointConflict:
                continue  # committed just now
            except HoldfastError as error:
                log.info("the save in flight was not aborted at the service: %s", error)
            return

    def close(self, *, drain_seconds: float, waited_seconds: float = 0.0) -> None:
        """Waits for the saves in flight, stops the threads, and reports the saves that are not committed.
        `waited_seconds`: how long the caller has waited already."""
        self._idle.wait(drain_seconds)
        for job in self.in_flight:
            job.leave()
        self._stop.set()
        if self.host_calls is not None:
            self.host_calls.flush(last=True)
        if (writer := self._writer) is not None:
            writer.stop()
        if (staged := self._staged) is not None:
            staged.give_up()
        threads = [thread for thread in (self._keeps, self._uploads) if thread is not None]
        for thread in threads:
            thread.end()
        for thread in threads:
            thread.join(STOP_SECONDS)
        if self.host_calls is not None:
            self.host_calls.close()  # not before: a seal that is under way counts
        cut_off = self.in_flight
        for job in cut_off:
            kind, state = (SaveFailed, SaveState.LOST) if job.record is None else (SaveSpooled, SaveState.SPOOLED)
            job.handle.fail(kind(f"The job ended before the checkpoint of step {job.step} was committed"), state)
        left = [*self._left, *cut_off]
        self._reports.ended_with(
            spooled=[job for job in left if job.record is not None],
            lost=[job for job in left if job.record is None],
            drain_seconds=drain_seconds + waited_seconds,
        )

    def _keep(self, job: SaveJob) -> None:
        """On the spool thread: makes the save durable on this node, and hands it on. A save without room here is
        uploaded straight from the slab, in its order."""
        assert self._tier is not None  # the thread runs only with a tier
        kept = job = self._settled(job)
        try:
            if isinstance(job.staged, StagedShard):
                kept = self._kept(job, self._tier)
        except BaseException as error:  # even Ctrl-C: the save goes on without its copy on this node
            is_torn = isinstance(error, TornSaveError)
            if isinstance(job.staged, StagedShard) and (is_torn or not job.staged.can_repeat):
                # Some chunks have left the window already, and are nowhere any more. The next save may have that memory
                # before the upload thread comes to this one. A torn save goes nowhere.
                self._release(job)
                kept = dataclasses.replace(job, staged=error, has_own_memory=True)
            if not is_torn and not self._stop.is_set():
                self._reports.not_kept(job, None if isinstance(error, NoRoom) else error)
        finally:
            with self._lock:
                self._in_flight[job.number] = kept
            if kept.record is None:
                job.handle.mark_local(kept=False)
            else:
                job.handle.become(SaveState.SPOOLED)
            self._uploads.put(kept)

    def _kept(self, job: SaveJob, tier: LocalTier) -> SaveJob:
        staged = job.staged
        assert isinstance(staged, StagedShard)
        job.handle.become(SaveState.HASHING)
        chunks, documents = self._chunks(job, staged), self._documents(staged)
        record = keep_save(self._session, tier.spool, job, chunks, index=documents, workers=self._workers)
        kept = dataclasses.replace(job, record=record)
        with self._lock:  # in one step: close() calls a save without a record lost
            self._in_flight[job.number] = kept
        digests = [chunk.digest for chunk in record.chunks]
        staged.hashed(digests)
        self._reports.kept()
        self._release(job, digests)
        return kept

    def _release(self, job: SaveJob, digests: Sequence[str] = ()) -> None:
        if job.handed is not None:
            job.handed.release(digests)
        if isinstance(job.staged, StagedShard):
            job.staged.give_up()
            job.staged.release()
        if not job.has_own_memory:
            self._staged = None
            self._free.set()

    def _settled(self, job: SaveJob) -> SaveJob:
        """On the first thread that takes the job: waits for the copies that training does not wait for. If they have
        failed, or something wrote to what they read, this rank could not stage."""
        late = job.late
        if late is None:
            return job
        try:
            late.settle()
            job = self.hand_over(job)
            job.handle.become(SaveState.STAGED)
            return job
        except BaseException as error:  # the copy's own, whatever it is: the next save waits for this memory
            self._release(job)
            return dataclasses.replace(job, staged=error, has_own_memory=True)
        finally:
            self._stats.blocked(late.waited_seconds)

    def _run(self, job: SaveJob) -> None:
        """On the upload thread. The handle hears how the save ended, even if the script's log handler raises."""
        committed: CheckpointView | None = None
        failure: BaseException | None = None
        if self._keeps is None:
            job = self._settled(job)
            with self._lock:
                self._in_flight[job.number] = job
        try:
            committed = self._commit(job)
        except BaseException as error:  # the next save may go well
            failure = error
        finally:
            self._watch.tell(job.number, committed)
            if job.record is None:
                self._release(job, self._writer.digests if committed is not None and self._writer is not None else ())
        ended: tuple[SaveFailed, SaveState] | None = None
        try:
            if committed is not None:
                self.last_committed_number = job.number
                self.rates.committed(job.total_bytes, time.monotonic() - job.begun_at)
                self._forget(job)
                self._reports.committed(job, committed)
            elif failure is not None:
                ended = self._failed(job, failure)
        finally:
            # Idle before the handle: a thread that waits for the handle may save again at once.
            with self._lock:
                self._in_flight.pop(job.number)
                if not self._in_flight:
                    self._idle.set()
            if committed is not None:
                job.handle.mark_committed(committed)
            else:
                job.handle.fail(*(ended or _not_committed(job, failure)))

    def _commit(self, job: SaveJob) -> CheckpointView:
        """Retries until a retry makes no more sense, while the bytes are here. Every rank that hears of an abort begins
        the same step again, and gets the same new checkpoint."""
        self._unread = 0
        backoff = Backoff(math.inf, self._stop.wait)
        for tries in itertools.count(1):
            check_stop(self._stop)
            if reason := self._superseded.get(job.number):
                raise SaveSuperseded(reason)
            if (given_up := self._watch.given_up(job.number)) is not None:
                raise given_up
            try:
                return self._save(job, tries)
            except HoldfastError as error:
                if not self._tries_again(job, error, tries):
                    raise
                begun = None if self._writer is None else self._writer.checkpoint_id
                if begun is not None and worth_another_begin(error):
                    self._watch.leave(job.number, begun)
                self._reports.tries_again(job, error)
            backoff.pause()
        raise AssertionError("the loop ends with a commit or an error")

    def _tries_again(self, job: SaveJob, error: BaseException, tries: int) -> bool:
        if job.number in self._superseded:
            return False
        if self._tier is not None and not isinstance(job.staged, BaseException):
            return verdict_of(error) is Verdict.AGAIN and self._unread < SPOOL_READS
        can_repeat = isinstance(job.staged, StagedShard) and job.staged.can_repeat
        return tries < BEGINS and can_repeat and worth_another_begin(error)

    def _save(self, job: SaveJob, tries: int) -> CheckpointView:
        staged = job.staged if job.record is None and isinstance(job.staged, StagedShard) else None
        prompt = self._tier is not None or (staged is not None and not staged.can_repeat)
        client = self._prompt_client if prompt else self._retrying_client
        job.handle.become(SaveState.UPLOADING)
        self._writer = writer = self._session.shard_writer(
            job.step, job.kind, self._workers, client, self.host_calls, save_number=job.number
        )
        writer.on_begun = functools.partial(self._refuse_if_given_up, job, writer)
        try:
            if staged is not None and not staged.can_repeat:
                writer.begin()  # before a chunk is taken out of the window: the call can be repeated until then
            if job.number in self._superseded:
                writer.stop()
            with self._progress.under_way(Phase.SAVING, job.step, job.total_bytes) as meter:
                writer.on_verified = meter.advance
                view = self._write(writer, job)
        except BaseException as error:
            self._unread = self._unread + 1 if isinstance(error, LocalReadFailed) else 0
            if staged is not None:
                staged.give_up()  # first: telling the service takes time, and training may be waiting
            if self._others_must_hear(job, error) and not self._tries_again(job, error, tries):
                cause = self._give_up(job, error)
                if cause is not None and not writer.begin_failed:
                    writer.fail(error)
            raise
        job.handle.become(SaveState.SEALED)
        if view.state is CheckpointState.UPLOADING:
            view = self._watch.wait(job.number, view.id)
        if view.state is CheckpointState.ABORTED:
            raise CheckpointAborted(view.abort_reason or "It was aborted", context={"cause": view.abort_cause})
        return view

    def _refuse_if_given_up(self, job: SaveJob, writer: ShardWriter) -> None:
        """Asked once more after the begin: if the failed rank's abort came in between, this begin has made a new
        checkpoint of the same step, which no other rank will ever seal."""
        if (error := self._watch.given_up(job.number)) is not None:
            if error.context:  # else it stays in the spools
                writer.fail(error)
            raise error

    def _give_up(self, job: SaveJob, error: BaseException) -> AbortCause | None:
        """Tells the other ranks before the service: a rank that finds the checkpoint aborted begins it again. Returns
        the cause that they hear; None if the next attempt can complete the save: it stays in every rank's spool, and
        the service, which must not say that a rank has failed, gives the checkpoint up when no rank calls."""
        why = str(error) if isinstance(error, CheckpointAborted) else f"Rank {self._rank} failed: {error}"
        stays = job.record is not None and verdict_of(error) is not Verdict.DROP
        cause = None if stays else AbortCause.RANK_FAILED
        self._watch.give_up(job.number, why, cause)
        return cause

    def _others_must_hear(self, job: SaveJob, error: BaseException) -> bool:
        """Whether this rank fails for good, and the others would wait for it."""
        if isinstance(error, (CheckpointAborted, *ENDS_THE_JOB)) or job.number in self._superseded or job.is_left:
            return False
        # A stopped save in the spool is not lost: the next attempt commits it.
        return job.record is None or not isinstance(error, TransferStopped)

    def _write(self, writer: ShardWriter, job: SaveJob) -> CheckpointView:
        if job.record is not None and self._tier is not None:
            view = push_shard(writer, self._tier.folder, job.record)
            self._reports.sent(writer)
            return view
        if isinstance(job.staged, BaseException):
            raise job.staged
        staged = job.staged
        if job.handed is not None:
            view = self._by_agent(writer, job, staged, job.handed)
        else:
            view = writer.upload_and_seal(
                self._chunks(job, staged), lambda: (job.told, self._documents(staged)), held_bytes=staged.room_bytes
            )
        staged.hashed(writer.digests)
        self._reports.sent(writer)
        return view

    def _by_agent(self, writer: ShardWriter, job: SaveJob, staged: StagedShard, handed: HandedSave) -> CheckpointView:
        """What the node's agent makes of it. If the agent is gone, this process does it: the bytes are here too."""
        if handed.is_with_agent:
            try:
                return handed.write(writer, lambda: job.told)
            except AgentGone as gone:
                log.warning("step %d is uploaded by this process: the agent of this node is gone (%s)", job.step, gone)
        return writer.upload_and_seal_again(
            lambda: self._chunks(job, staged), lambda: (job.told, self._documents(staged))
        )

    def _failed(self, job: SaveJob, failure: BaseException) -> tuple[SaveFailed, SaveState]:
        """What the save's handle is told, and whether its bytes are safe."""
        safe = SaveState.LOST if job.record is None else SaveState.SPOOLED
        if reason := self._superseded.get(job.number):
            if job.record is not None:
                self._left.append(job)
            return self._reports.superseded(job, reason), safe
        if job.is_left:
            return self._reports.left_to_agent(job), safe
        dropped = verdict_of(failure) is Verdict.DROP
        if dropped or isinstance(job.staged, BaseException):
            # Also after an abort that this rank only heard of, or before its begin: a rank that is some saves behind
            # would begin this one, and wait for a shard that no rank has.
            self._give_up(job, failure)
        if job.record is None:
            if isinstance(failure, TransferStopped):
                self._left.append(job)
            return self._reports.failed(job, failure), safe
        if dropped:
            self._forget(job)
            return self._reports.failed(job, failure), SaveState.LOST
        if isinstance(failure, CheckpointConflict):  # what is committed of this step is corrupt: no launch replaces it
            return self._reports.failed(job, failure), safe
        self._left.append(job)
        return self._reports.left_in_spool(job, failure), safe

    def _forget(self, job: SaveJob) -> None:
        """The tier may evict the save's chunks. If that fails, the next launch finds it committed."""
        if job.record is not None and self._tier is not None:
            try:
                self._tier.spool.forget(job.record.name)
            except OSError as error:
                log.warning("step %d stays in the spool of %s: %s", job.step, self._tier.path, error)


def _not_committed(job: SaveJob, failure: BaseException | None) -> tuple[SaveFailed, SaveState]:
    """What the handle is told if the end of its save could not even be reported."""
    state = SaveState.LOST if job.record is None else SaveState.SPOOLED
    return SaveFailed(f"The checkpoint of step {job.step} was not committed. {failure}"), state


class SaveReports:
    """Logs and counts the background half of each save for people and `ckpt.stats`: one line per outcome, not per
    try."""

    def __init__(self, session: Session, stats: SaveStats, tier: LocalTier | None) -> None:
        self._session = session
        self._stats = stats
        self._tier = tier
        self._first = session.ranks.is_first
        self._tries_since: float | None = None

    def kept(self) -> None:
        self._stats.spooled += 1

    def sent(self, writer: ShardWriter) -> None:
        self._stats.sent_bytes += writer.sent_bytes
        self._stats.sent_chunk_bytes += writer.sent_chunk_bytes

    def not_kept(self, job: SaveJob, error: BaseException | None) -> None:
        """It goes straight to the store. `error` is None if the tier only lacks room."""
        assert self._tier is not None  # the spool thread calls this only with a tier
        log.warning(
            "step %d of rank %d is not kept on this node, and goes straight to the store when its turn comes: %s",
            job.step,
            self._session.ranks.rank,
            f"{self._tier.path} cannot be written to ({error})"
            if error is not None
            else f"{self._tier.path} is full of saves that are not committed yet. `holdfast spool list` shows them; "
            "raise HOLDFAST_LOCAL_BYTES, or give the store more bandwidth",
        )

    def tries_again(self, job: SaveJob, error: Exception) -> None:
        """A try has failed and another follows. Logged once per outage."""
        if self._tries_since is None:
            self._tries_since = time.monotonic()
            # An outage of the service meets every rank; any other error meets this rank alone, which must report it.
            if self._first or not isinstance(error, ServiceUnavailable):
                where = "safe on this node" if job.record is not None else "staged"
                log.warning("step %d is %s and not committed yet; it is tried again. %s", job.step, where, error)

    def committed(self, job: SaveJob, view: CheckpointView) -> None:
        self._stats.committed += 1
        self._stats.last_committed_step = job.step
        late = ""
        if self._tries_since is not None:
            self._stats.committed_late += 1
            late = f", late: earlier tries failed for {time.monotonic() - self._tries_since:.0f} s"
            self._tries_since = None
        if self._first:
            log.info(
                "committed %s at step %d: %s of state, %s sent, in %.1f s%s",
                self._session.run,
                job.step,
                readable_bytes(view.logical_bytes),
                readable_bytes(view.uploaded_bytes),
                time.monotonic() - job.begun_at,
                late,
            )

    def failed(self, job: SaveJob, failure: BaseException) -> SaveFailed:
        """The save was given up for good."""
        self._tries_since = None
        self._stats.failed += 1
        self._session.note(failure)
        failed = SaveFailed(f"The checkpoint of step {job.step} was not committed. {failure}")
        failed.__cause__ = failure
        self._stats.last_failure = failed
        # The rank that aborted this checkpoint reports it; for all the others rank 0 does.
        if self._first or not isinstance(failure, CheckpointAborted):
            log.warning("%s Training goes on.", failed)
        return failed

    def superseded(self, job: SaveJob, reason: str) -> SaveSuperseded:
        """The save made room for a newer state."""
        self._tries_since = None
        self._stats.superseded += 1
        kept = " It stays on this node's disk." if job.record is not None else ""
        return SaveSuperseded(f"The checkpoint of step {job.step} was given up. {reason}.{kept}")

    def left_in_spool(self, job: SaveJob, failure: BaseException) -> SaveSpooled:
        """This job will not commit the save, but its bytes are safe."""
        self._tries_since = None
        self._session.note(failure)
        left = SaveSpooled(f"The checkpoint of step {job.step} is on this node's disk and not committed. {failure}")
        left.__cause__ = failure
        if isinstance(failure, LocalReadFailed | InvalidRequest):
            log.warning("%s The saves after it go on.", left)
        return left

    def left_to_agent(self, job: SaveJob) -> SaveFailed:
        """This job has ended before it, and the agent of the node goes on."""
        left = SaveFailed(
            f"The job ended before step {job.step} was committed; the agent of this node goes on with it, as long "
            "as the service takes it"
        )
        log.warning("%s", left)
        return left

    def ended_with(self, spooled: Sequence[SaveJob], lost: Sequence[SaveJob], drain_seconds: float) -> None:
        """The job ends, and these saves are not committed."""
        if lost:
            within = f"within {drain_seconds:.0f} s" if drain_seconds >= 1 else "in time"
            log.warning("the save in flight was not over %s and was given up", within)
        if spooled and self._tier is not None:
            steps = ", ".join(str(job.step) for job in spooled)
            log.warning(
                "not committed yet, and safe in the spool of this node: %s, rank %d, step %s. The next launch of the "
                "run with this folder commits them first; without it, run `holdfast spool push --dir %s` here.",
                self._session.run,
                self._session.ranks.rank,
                steps,
                self._tier.path,
            )
