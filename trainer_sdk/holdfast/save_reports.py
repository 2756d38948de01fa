"""What people and `ckpt.stats` hear of the background half of a save: one line per outcome, not per try."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from holdfast.errors import CheckpointAborted, SaveFailed, SaveSpooled, SaveSuperseded
from holdfast.readable import readable_bytes
from holdfast.save_job import SaveJob
from holdfast.session import Session
from holdfast.stats import SaveStats
from holdfast_client.errors import ServiceUnavailable
from holdfast_client.local.tier import LocalTier
from holdfast_client.shard_writer import ShardWriter
from holdfast_protocol.checkpoints import CheckpointView

log = logging.getLogger("holdfast")


class SaveReports:
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
        """It goes straight to the store. `error` is None where there is only no room."""
        assert self._tier is not None  # only with one is there anything to keep
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
        """A try has failed and another follows. Said once per outage."""
        if self._tries_since is None:
            self._tries_since = time.monotonic()
            # Every rank meets an outage of the service; what only one of them meets, that one tells.
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
        """It was given up."""
        self._tries_since = None
        self._stats.failed += 1
        self._session.note(failure)
        failed = SaveFailed(f"The checkpoint of step {job.step} was not committed. {failure}")
        failed.__cause__ = failure
        self._stats.last_failure = failed
        # What another rank did to this checkpoint is told by that rank and, for all the others, by rank 0.
        if self._first or not isinstance(failure, CheckpointAborted):
            log.warning("%s Training goes on.", failed)
        return failed

    def superseded(self, job: SaveJob, reason: str) -> SaveSuperseded:
        """It made room for a newer state."""
        self._tries_since = None
        self._stats.superseded += 1
        kept = " It stays on this node's disk." if job.record is not None else ""
        return SaveSuperseded(f"The checkpoint of step {job.step} was given up. {reason}.{kept}")

    def left_in_spool(self, job: SaveJob, failure: BaseException) -> SaveSpooled:
        """This job will not commit it, and its bytes are safe."""
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
