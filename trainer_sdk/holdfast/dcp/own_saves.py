"""Saves by the loop's own torch.distributed.checkpoint.save, as checkpoints of the run.

step_with() -> agreement, schedule (due?) -> the loop's own dcp.save -> writer() -> dcp/writer
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.distributed.step_agreement import Ask
from holdfast.health.diverged import FiniteCheck
from holdfast_protocol.states import CheckpointKind

if TYPE_CHECKING:
    from holdfast.compose import Parts
    from holdfast.dcp.writer import HoldfastWriter


_ASYNC_SAVE_THREADS = "AsyncCheckpointExecutor"
"""torch's names, one thread for each dcp.async_save."""


class OwnSaves:
    """What `Checkpointer.writer` and `step_with` do; their docstrings say what they promise. `raise_pending` raises an
    error that an earlier save has left for the training thread."""

    def __init__(self, parts: Parts, raise_pending: Callable[[], None]) -> None:
        self._parts = parts
        self._raise_pending = raise_pending
        self._has_writers = False  # writer() was called: a dcp.async_save may be running
        self._written_step: int | None = None  # the step of a writer made since the last step_with(); on every rank

    def writer(self, step: int, kind: CheckpointKind) -> HoldfastWriter:
        from holdfast.dcp.writer import HoldfastWriter

        session = self._parts.session
        self._parts.rest.settle()
        session.open()
        if not session.is_half_restored:  # else maybe this rank alone is, and the writer tells the others
            session.ready_to_save()
        finite = FiniteCheck.asked_for(self._parts.check_finite)
        self._written_step = step
        self._has_writers = True
        return HoldfastWriter(session, self._parts.workers, step, kind, finite=finite, stats=self._parts.stats)

    def are_over(self, timeout_seconds: float | None) -> bool:
        """Waits for the dcp.async_save in flight. Only DCP's own thread tells of it, because it ends with its save.
        False if it takes longer."""
        if not self._has_writers:
            return True
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        saving = [thread for thread in threading.enumerate() if thread.name.startswith(_ASYNC_SAVE_THREADS)]
        for thread in saving:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in saving)

    def step_with(self, step: int, save: Callable[[], object]) -> bool:
        last = self._parts.session.progress.step
        self._parts.session.progress.ran(step)
        if not self._parts.session.may_save:
            self._parts.rest.settle()
            self._parts.session.ready_to_save()
        ask = self._parts.agreement.due(step)
        if ask is Ask.PREEMPT:
            raise self._parts.emergency.save_with(step, save)
        due = self._parts.schedule.due(step, None, agreed=ask is Ask.SAVE, last=last) is not None
        calls = due and self._written_step != step
        try:
            if calls:
                with self._parts.session.progress.saving():
                    save()
        finally:
            self._written_step = None
            if due:
                self._parts.schedule.restart()
                self._parts.agreement.restart()
        self._raise_pending()
        return calls
