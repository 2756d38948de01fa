"""`stage_every=`: the state of some steps lies staged in memory, in case a notice comes and no step ends in time.

    training threads, every so many steps -> [a second slab], in place of the last staged state; nothing is sent
    after a notice, at the last moment at which it would still fit: rank 0's watch says so, all watches upload it

It costs a second slab: as much host memory as the rank's share of the state, and the time of a copy each time. It does
not disturb a save in flight, but waits behind it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from holdfast.distributed.ranks import Ranks
from holdfast.errors import ConfigurationError
from holdfast.layout.plan import LocalPlan
from holdfast.preemption.estimate import may_wait_for_a_step
from holdfast.save.job import SaveJob
from holdfast.save.pipeline import SavePipeline
from holdfast.save.saver import Metrics, Saver
from holdfast.schedule.save_policy import ends_a_round
from holdfast.staging import StagedShard, StagingArea
from holdfast.state.tensors import TensorPiece
from holdfast_client.chunks.workers import WorkerThreads

log = logging.getLogger("holdfast")


def check_stage_every(every: int | None, *, window: int | None) -> None:
    """Before anything is made. Raises ConfigurationError for an unusable number of steps, or memory that is not
    allowed."""
    if every is None:
        return
    if type(every) is not int or every < 1:
        raise ConfigurationError(f"stage_every={every!r} must be a whole number of steps, at least 1.")
    if window is not None:
        raise ConfigurationError(
            "stage_every holds a whole second state in host memory, and host_memory bounds it. Leave one of them out."
        )


class _OneSlab(StagingArea):
    """Frees its slab only when all ranks have voted to stage: before that, a rank may still need the staged state."""

    def __init__(self, make_room: Callable[[], None], helpers: WorkerThreads) -> None:
        super().__init__(helpers=helpers)
        self._make_room = make_room

    def stage(
        self, plan: LocalPlan, pieces: Sequence[TensorPiece], *, meanwhile: Callable[[], object] = lambda: None
    ) -> StagedShard:
        self._make_room()
        return super().stage(plan, pieces, meanwhile=meanwhile)


class StandbySnapshot:
    """`stage` is for the training thread, `look` for the watch."""

    def __init__(
        self,
        every: int,
        ranks: Ranks,
        saver: Saver,
        pipeline: SavePipeline,
        *,
        helpers: WorkerThreads,
    ) -> None:
        self._every = every
        self._ranks = ranks
        self._saver = saver
        self._pipeline = pipeline
        self._area = _OneSlab(self._make_room, helpers)
        self._store = ranks.store("standby")
        self._lock = threading.Lock()
        self._staged: SaveJob | None = None
        self._has_warned = False
        self._over = False
        """It is uploading, or is not wanted any more."""
        self._first_left: float | None = None

    def is_due(self, step: int, last: int | None) -> bool:
        """The same on all ranks. Steps are counted as for Every(steps=…). `last`: the step before."""
        return ends_a_round(self._every, step, last)

    def stage(self, step: int, state: Mapping[str, Any], metrics: Metrics | None) -> None:
        """Collective. Raises as save() does. When it returns, the state may change."""
        job = self._saver.stage_apart(step, state, metrics, self._area)
        if isinstance(job.staged, StagedShard):
            with self._lock:
                self._staged = job
        elif not self._over and not self._has_warned:
            self._has_warned = True
            log.warning("nothing can be staged for stage_every: %s", job.staged)

    def forget(self) -> None:
        """Another state was loaded: the staged one must not be saved."""
        with self._lock:
            if not self._over:
                self._drop()
        self._area.forget_frozen()

    def look(self, left_seconds: float, settle: Callable[[], bool]) -> None:
        """Uploads the staged state if this is the last moment for it. `settle()`: False if the training threads have
        met meanwhile; asked on rank 0, which decides for all."""
        with self._lock:
            job = self._staged
            if self._over or job is None or not self._is_wanted(job):
                return
            if self._ranks.is_first:
                if not self._is_last_moment(job, left_seconds) or not settle() or not self._tell(job.step):
                    return
            elif not self._is_told_to(job.step):
                return
            self._upload(job)

    def close(self) -> None:
        with self._lock:
            if not self._over:
                self._drop()
            self._over = True
        self._area.close()

    def _upload(self, job: SaveJob) -> None:
        self._over = True
        with suppress(Exception):  # of the script's log handler: the watch must go on
            log.warning("no step has ended in time: the state staged after step %d is saved", job.step)
        self._pipeline.start(dataclasses.replace(job, begun_at=time.monotonic()))

    def _make_room(self) -> None:
        """All ranks are here, so the last staged state is not needed any more, unless it is uploading."""
        with self._lock:
            job = self._staged
            # Rank 0 may have begun just now, and this rank's watch has not looked since.
            if not self._over and job is not None and self._is_wanted(job) and self._is_told_to(job.step):
                self._upload(job)
            if self._over:
                raise RuntimeError("the last staged state is uploading")
            self._drop()

    def _drop(self) -> None:
        if self._staged is not None and isinstance(self._staged.staged, StagedShard):
            self._staged.staged.release()
        self._staged = None

    def _is_wanted(self, job: SaveJob) -> bool:
        """Whether no state as new is committed or in flight."""
        in_flight = [each.number for each in self._pipeline.in_flight]
        return job.number > max(in_flight, default=self._pipeline.last_committed_number)

    def _is_last_moment(self, job: SaveJob, left_seconds: float) -> bool:
        if math.isinf(left_seconds):
            return False  # no deadline is known; a later notice may bring one
        rates = self._pipeline.rates
        ahead = sum(each.total_bytes for each in self._pipeline.in_flight)
        seconds = rates.seconds_for(job.total_bytes + ahead)
        if self._first_left is None:
            self._first_left = left_seconds
        return left_seconds <= self._first_left - may_wait_for_a_step(self._first_left, seconds)

    def _tell(self, step: int) -> bool:
        """Tells the other ranks to upload it too. False if the job's store has ended together with the job."""
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set("upload", str(step))
            return True
        return False

    def _is_told_to(self, step: int) -> bool:
        with suppress(RuntimeError):  # the job's store has ended together with the job
            return (
                self._store is not None
                and self._store.check(["upload"])
                and self._store.get("upload").decode() == str(step)
            )
        return False
