"""The outcome of a save after this rank's seal: learned from the service, and reported."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from holdfast.distributed.ranks import Ranks
from holdfast.errors import CheckpointAborted, HoldfastError, SaveFailed, SaveSpooled, SaveSuperseded
from holdfast.progress import readable_bytes
from holdfast.save.job import SaveJob, SaveStats
from holdfast.session.session import Session
from holdfast_client.client import Client
from holdfast_client.errors import ServiceUnavailable, TransferStopped
from holdfast_client.local.tier import LocalTier
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import AbortCause, CheckpointState

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

    def give_up(self, number: int, reason: str) -> None:
        """This rank has failed for good. The service aborts the existing checkpoint; a rank that comes to this save
        later would begin it again, and wait for ever."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"given-up/{number}", reason)

    def given_up(self, number: int) -> str | None:
        """Why this save cannot be completed, or None if no rank has said so."""
        try:
            if self._store is None or not self._store.check([f"given-up/{number}"]):
                return None
            return self._store.get(f"given-up/{number}").decode()
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
            reason = self.given_up(number)
            view = self._client.checkpoints.get(checkpoint_id, wait_seconds=None if reason else LONG_POLL_SECONDS)
            if view.state is not CheckpointState.UPLOADING:
                return view
            if reason:
                # That rank may have failed before it could tell the service.
                raise CheckpointAborted(reason, context={"cause": AbortCause.RANK_FAILED})
        raise TransferStopped("This job ended before it heard what became of its checkpoint")

    def _key(self, number: int, checkpoint_id: str = "") -> str:
        return f"{self._host}/{number}/{checkpoint_id}"


log = logging.getLogger("holdfast")


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
        self._session.note(failure)
        left = SaveSpooled(f"The checkpoint of step {job.step} is on this node's disk and not committed. {failure}")
        left.__cause__ = failure
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
