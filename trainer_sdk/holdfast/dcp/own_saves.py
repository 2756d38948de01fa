"""The half of a Checkpointer for loops that save by their own torch.distributed.checkpoint.save.

step_with() -> agreement, when/schedule (due?) -> the loop's own dcp.save -> writer() -> dcp/writer
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.distributed.agreement import Ask, StepAgreement
from holdfast.errors import Preempted
from holdfast.preemption.emergency import EmergencySave
from holdfast.save.job import SaveStats
from holdfast.schedule.schedule import Schedule
from holdfast.session.session import Session
from holdfast.state.finite import FiniteCheck
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_protocol.states import CheckpointKind

if TYPE_CHECKING:
    from holdfast.dcp.writer import HoldfastWriter


_ASYNC_SAVE_THREADS = "AsyncCheckpointExecutor"
"""As torch names them, one for each dcp.async_save."""


class OwnSaves:
    """The parts are made by the Checkpointer."""

    stats: SaveStats
    _agreement: StepAgreement
    _check_finite: bool | None
    _emergency: EmergencySave
    _preempted: Preempted | None
    _raise_pending: Callable[[], None]
    _schedule: Schedule
    _session: Session
    _workers: TransferWorkers
    _has_writers = False
    """writer() was called: a dcp.async_save may be under way."""
    _written_step: int | None = None
    """That a writer was made for since the last step_with(); on every rank."""

    def writer(self, step: int, *, kind: CheckpointKind | str = CheckpointKind.PERIODIC) -> HoldfastWriter:
        """A storage writer for your own `torch.distributed.checkpoint.save`: one checkpoint of this run. A loop that
        saves by nothing else hears of a notice to leave by step_with().

        `check_finite` holds here too: what has NaN in any of its tensors is kept as diverged, and not resumed from.
        Infinity is not looked for, as names alone do not say what is trained. `healthy` is not asked: there are no
        metrics.
        """
        from holdfast.dcp.writer import HoldfastWriter

        self._session.ready_to_save()
        finite = FiniteCheck.asked_for(self._check_finite)
        self._written_step = step
        self._has_writers = True
        return HoldfastWriter(self._session, self._workers, step, CheckpointKind(kind), finite=finite, stats=self.stats)

    def _own_saves_are_over(self, timeout_seconds: float | None) -> bool:
        """Waits for the dcp.async_save in flight, of which nothing tells but DCP's own thread: it ends with its save.
        False if it takes longer."""
        if not self._has_writers:
            return True
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        saving = [thread for thread in threading.enumerate() if thread.name.startswith(_ASYNC_SAVE_THREADS)]
        for thread in saving:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in saving)

    def step_with(self, step: int, save: Callable[[], object]) -> bool:
        """step() for a loop that saves by its own dcp.save: call it after each step, on every rank.

        `save` is called where a save is due (`save=` of the Checkpointer; never for Best, as there are no metrics), and
        where the job is told to leave: once it is committed, Preempted is raised on every rank. It saves this step with
        `writer(step)`, and raises what dcp.save raises. A step that the loop has saved itself is not saved again.
        Returns whether `save` was called; else it costs about a microsecond.
        """
        self._session.account.ran(step)
        if not self._session.may_save:
            self._session.ready_to_save()
        ask = self._agreement.due(step)
        if ask is Ask.PREEMPT:
            if self._preempted is None:
                self._preempted = self._emergency.save_with(step, save)
            raise self._preempted
        due = self._schedule.due(step, None, agreed=ask is Ask.SAVE) is not None
        calls = due and self._written_step != step
        try:
            if calls:
                with self._session.account.saving():
                    save()
        finally:
            self._written_step = None
            if due:
                self._schedule.restart()
                self._agreement.restart()
        self._raise_pending()
        return calls
