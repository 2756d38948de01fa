"""The half of a Checkpointer that loads: restore() at the beginning of a launch, rollback() in a running job.

restore()  -> session (attempt) -> restore -> documents, source -> state.load
rollback() -> health.rollback (saves in flight, a new attempt) -> restore
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from holdfast.distributed.agreement import StepAgreement
from holdfast.distributed.ranks import Ranks
from holdfast.health.rollback import Rollback
from holdfast.preemption.cover import StagedCover
from holdfast.restore.restorer import Restorer
from holdfast.save.job import SaveStats
from holdfast.save.pipeline import SavePipeline
from holdfast.save.saver import Saver
from holdfast.schedule.schedule import Schedule
from holdfast.session.session import Session
from holdfast_client.chunks.workers import TransferWorkers

if TYPE_CHECKING:
    from holdfast.dcp.reader import HoldfastReader
    from holdfast.verify.recorder import Recorder


class Loading:
    """The parts are made by the Checkpointer."""

    _agreement: StepAgreement
    _cover: StagedCover | None
    _pipeline: SavePipeline
    _ranks: Ranks
    _recorder: Recorder | None
    _restorer: Restorer
    _rollback: Rollback
    _saver: Saver
    _schedule: Schedule
    _session: Session
    _workers: TransferWorkers
    stats: SaveStats

    def restore(self, state: dict[str, Any], at: str | None = None, *, skip_diverged: bool = True) -> int:
        """Loads the newest restore point into `state`, and returns the next step to run. Call it on every rank.

        0, with nothing touched, only where the service says that nothing was ever committed in this run. A checkpoint
        that cannot be read whole is reported, and all ranks take the one before it. With `at` (`"1200"`, `"best:loss"`,
        a checkpoint's id) exactly that one is loaded or it raises; the run goes on from there, and what came after is
        never its latest again. With `skip_diverged=False` a checkpoint that has diverged will do as well.

        Raises on every rank or on none: NoRestorePoint, IntegrityError, StateMismatchError, ServiceUnavailable, ….
        Bytes arrive in the tensors while they are hashed. So where it raises, the state may hold parts of a checkpoint;
        the exception says so, and nothing is saved until a restore has ended well.
        """
        self._pipeline.wait_idle(self._ranks.timeout_seconds / 2)
        return self._loading(state, lambda: self._restorer.restore(state, at, skip_diverged=skip_diverged))

    def rollback(
        self,
        state: dict[str, Any],
        *,
        steps: int | None = None,
        before: int | None = None,
        skip_data: bool = False,
        keep: Iterable[str] = (),
    ) -> int:
        """Goes back to the newest healthy checkpoint without a new launch, and returns the next step to run. Call it on
        every rank, with the same target.

        `steps`: at least so many steps back from the last one that was run. `before`: to a step below this one. Without
        them, to the newest that has not diverged.
        `skip_data`: data loaders and samplers (keys of any rank's state with `loader` or `sampler` in them) are not
        loaded: they stay where they are now, behind the data that poisoned the training. Else they go back too, and the
        same batches come again. `keep`: further components, of any rank, that stay as they are.

        A save in flight is finished, or given up after half a minute, and what `stage_every` has staged is dropped.
        Then the job goes on as a new attempt of the run, and what it has saved since the checkpoint is never the run's
        latest again. Raises NoRestorePoint where there is no such checkpoint: the state is what it was, and the attempt
        goes on. StaleAttempt where another launch has taken over; and what restore() raises.
        """
        if self._cover is not None:
            self._cover.forget()  # of the state that is left: the new attempt must not save it
        back = self._rollback.back
        return self._loading(
            state, lambda: back(state, steps=steps, before=before, keep=frozenset(keep), skip_data=skip_data)
        )

    def reader(self, at: str | None = None) -> HoldfastReader:
        """A storage reader for your own `torch.distributed.checkpoint.load`; without `at` of the newest restore point.

        Call it on every rank. Raises NoRestorePoint where there is none: ask for `reader.step` to go on from there.
        """
        from holdfast.dcp.reader import HoldfastReader

        return HoldfastReader(self._session, self._workers, self._restorer.choose(at), rollback=at is not None)

    def _loading(self, state: dict[str, Any], load: Callable[[], int]) -> int:
        try:
            start = load()
        finally:
            self._saver.forget_frozen()
            if self._cover is not None:
                self._cover.forget()
        if self._recorder is not None:
            self._recorder.restored(start, state)
        if self.stats.last_committed_step is not None:
            # A step that was left is not saved, though it may have the number of one that is to come.
            self.stats.last_committed_step = start - 1
        self._schedule.restored()
        self._agreement.restart()
        return start
