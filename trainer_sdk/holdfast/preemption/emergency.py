"""The emergency save, on the training threads of all ranks, after the step at which they leave.

    numbers of all ranks -> rank 0 decides (estimate.py) -> supersede, or wait, or neither -> save -> wait -> Preempted

The caller raises. Whatever fails in here, all ranks leave, because the machine is taken either way.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from holdfast.distributed.ranks import Ranks
from holdfast.errors import ENDS_THE_JOB, Preempted
from holdfast.preemption.estimate import Choice, Decision, Numbers, decide, may_wait
from holdfast.preemption.watch import PreemptionWatch
from holdfast.progress import Phase, ProgressBoard
from holdfast.save.job import SaveHandle, SaveJob, SaveStats
from holdfast.save.pipeline import SavePipeline
from holdfast.save.saver import Metrics, Saver
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import CheckpointKind

_TELLING = 0.25
"""A save's rate is unknown until this part of it is done."""
_HEARS_WITHIN_SECONDS = 1.0
"""A save is over a moment before its handle hears of the commit."""

log = logging.getLogger("holdfast")


class EmergencySave:
    def __init__(
        self,
        ranks: Ranks,
        saver: Saver,
        pipeline: SavePipeline,
        watch: PreemptionWatch,
        *,
        stats: SaveStats,
        progress: ProgressBoard,
    ) -> None:
        self._ranks = ranks
        self._saver = saver
        self._pipeline = pipeline
        self._watch = watch
        self._stats = stats
        self._progress = progress
        self._told: Preempted | None = None
        self._handle: SaveHandle | None = None
        """Of the save that this has made."""

    def save(self, step: int, state: Mapping[str, Any], metrics: Metrics | None) -> Preempted:
        """Returns the exception to raise, the same one again when called again; it says which step was saved.
        Collective. Raises an error that ends the job anyway, such as StaleAttempt."""
        return self._leaving(step, lambda: self._save(step, state, metrics))

    def save_with(self, step: int, save: Callable[[], object]) -> Preempted:
        """As save(), by the loop's own dcp.save, which ends once it is committed."""
        return self._leaving(step, lambda: self._save_with(step, save))

    def _leaving(self, step: int, work: Callable[[], str]) -> Preempted:
        if self._told is not None:
            return self._told
        try:
            said = work()
        except ENDS_THE_JOB:
            raise
        except Exception as error:
            said = f"The state of step {step} could not be saved: {error}"
        newest = self._stats.last_committed_step
        if newest != step:
            said += " Nothing was committed by this attempt." if newest is None else f" Committed is step {newest}."
        self._watch.said = said
        self._told = Preempted(
            f"This job was told to leave ({self._watch.notice}). {said}",
            saved_step=newest,
            notice=str(self._watch.notice),
            checkpoint=_committed(self._handle, _HEARS_WITHIN_SECONDS if newest == step else 0.0),
        )
        return self._told

    def _save(self, step: int, state: Mapping[str, Any], metrics: Metrics | None) -> str:
        decision = self._decided(step)
        if decision.choice is Choice.BOTH:
            self._pipeline.wait_free(min(self._watch.wait_seconds(), may_wait(decision.left, decision.new_seconds)))
            if any(self._ranks.gather(self._pipeline.busy)):
                decision = self._decided(step, has_waited=True)
        if decision.choice is Choice.SUPERSEDE:
            self._pipeline.supersede(f"There was no time left for it and for step {step}")
            self._pipeline.wait_free(self._watch.wait_seconds())
        if decision.choice in (Choice.NEW, Choice.BOTH, Choice.SUPERSEDE):
            self._handle = self._saver.save(step, state, metrics, CheckpointKind.EMERGENCY, wait=False)
        self._pipeline.wait_idle(self._watch.wait_seconds())
        if decision.choice is Choice.SAVED and self._has_failed(step):
            self._handle = self._saver.save(step, state, metrics, CheckpointKind.EMERGENCY, wait=False)
            self._pipeline.wait_idle(self._watch.wait_seconds())
        return self._outcome(step, decision, self._handle)

    def _has_failed(self, step: int) -> bool:
        """Whether the save of this step that was in flight is over without a commit. Collective."""
        told = self._ranks.gather((self._stats.last_committed_step == step, bool(self._pipeline.in_flight)))
        return not any(is_committed or is_in_flight for is_committed, is_in_flight in told)

    def _save_with(self, step: int, save: Callable[[], object]) -> str:
        if self._ranks.is_first:
            with suppress(Exception):  # of the script's log handler: the other ranks are on their way into the vote
                log.warning("leaving after step %d: it is saved by the loop's own save", step)
        if not self._is_committed(step):
            save()
        self._pipeline.wait_idle(self._watch.wait_seconds())  # saves that step() or save() began
        return f"The checkpoint of step {step} is {'' if self._is_committed(step) else 'not '}committed."

    def _is_committed(self, step: int) -> bool:
        """Rank 0's knowledge, on every rank, because DCP reports the end of a save only there. Collective."""
        self._stats.last_committed_step = self._ranks.from_first(lambda: self._stats.last_committed_step)
        return self._stats.last_committed_step == step

    def _decided(self, step: int, *, has_waited: bool = False) -> Decision:
        """The same on all ranks, from the numbers of all. Collective."""
        numbers = self._ranks.gather(self._numbers(step))

        def on_first() -> Decision:
            decision = decide(numbers, has_waited=has_waited)
            # From here on, a standby snapshot is either uploading or never will be.
            if not has_waited and not self._watch.settle():
                decision = dataclasses.replace(decision, choice=Choice.STAGED)
            with suppress(Exception):  # of the script's log handler: every rank would leave without a save
                log.warning("leaving after step %d: %s", step, decision)
            return decision

        return self._ranks.from_first(on_first)

    def _numbers(self, step: int) -> Numbers:
        in_flight = self._pipeline.in_flight
        rates = self._pipeline.rates
        new = rates.seconds_for(rates.bytes)
        seconds: float | None = 0.0
        for job in in_flight:
            takes, done = rates.seconds_for(job.total_bytes), self._done(job)
            if takes is None and done >= _TELLING:
                # The first save of this job: as fast as so far. The next one is about as large.
                new = takes = (time.monotonic() - job.begun_at) / done
            seconds = None if seconds is None or takes is None else seconds + takes * (1 - done)
        return Numbers(
            left=self._watch.left_seconds(),
            is_saved=step in (self._stats.last_committed_step, *(job.step for job in in_flight)),
            in_flight=bool(in_flight),
            in_flight_seconds=seconds,
            new_seconds=new,
        )

    def _done(self, job: SaveJob) -> float:
        """The verified part of it, 0 to 1; 0 while it waits for its upload."""
        progress = self._progress.read()
        if progress is None or progress.phase is not Phase.SAVING or progress.step != job.step:
            return 0.0
        return min(1.0, progress.bytes_done / max(job.total_bytes, 1))

    def _outcome(self, step: int, decision: Decision, handle: SaveHandle | None) -> str:
        if self._stats.last_committed_step == step:
            return f"The checkpoint of step {step} is committed."
        if handle is None:
            return f"Left at step {step}: {decision.choice}."
        if handle.local.done() and handle.local.exception() is None and handle.local.result():
            return f"The checkpoint of step {step} is in the spool of this node, and not committed."
        if handle.committed.done() and (error := handle.committed.exception()) is not None:
            return f"{error}"
        if math.isinf(decision.left):
            return f"The checkpoint of step {step} is not committed."
        return f"The checkpoint of step {step} was not committed in time."


def _committed(handle: SaveHandle | None, timeout_seconds: float) -> CheckpointView | None:
    # A view, and no handle: launchers carry the exception to another process, and futures stay where they are.
    with suppress(TimeoutError):
        if handle is not None and handle.committed.exception(timeout_seconds) is None:
            return handle.committed.result()
    return None
