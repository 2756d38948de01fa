"""Tells a tracking tool of the restore points of a job: what MLflow and Weights & Biases have in common.

    checkpointer.step(…) -> handle -> log(handle) -> a thread of its own waits for the commit -> the tool
    Preempted, at the end of the `with` block -> the checkpoint of the emergency save -> the tool

The tool is asked on that thread alone. If it is slow or unavailable, neither training nor saving waits, and the log has
a warning. Only the start of the job waits for its first answer, for some seconds.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from holdfast.errors import Preempted
from holdfast.save.job import SaveHandle
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import Health

log = logging.getLogger("holdfast")

_BEGIN_SECONDS = 10.0
_CLOSE_SECONDS = 60.0
_CLOSE_AFTER_ERROR_SECONDS = 5.0
"""The machine of a job that must leave is taken soon, and a crash is to be seen."""
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


class RestorePointLog:
    """On rank 0. On the other ranks log() and close() do nothing.

    A `with` block around the Checkpointer's closes it. If the job must leave, step() returns no handle for what it has
    saved: the end of the block tells the tool of that."""

    tool = ""

    def __init__(self, run: str) -> None:
        self.run = run
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._saves: queue.SimpleQueue[SaveHandle | CheckpointView | None] = queue.SimpleQueue()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"holdfast-{self.tool}", daemon=True)
        if self.is_first:
            self._thread.start()
            self._begun.wait(_BEGIN_SECONDS)

    def log(self, handle: SaveHandle | None) -> SaveHandle | None:
        """Takes what step() and save() return, and returns it. The tool hears of it once it can be resumed from; of a
        save that failed or has diverged it never does."""
        if handle is not None and self.is_first:
            self._saves.put(handle)
        return handle

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Waits, within bounds, until the tool was told of all that is committed. Call it after the Checkpointer's own
        end, which waits for the last save."""
        if self.is_first:
            self._saves.put(None)
            self._thread.join(timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_first and isinstance(error, Preempted) and error.checkpoint is not None:
            self._saves.put(error.checkpoint)
        # sys.exit(0) is a normal end.
        is_normal = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close(_CLOSE_SECONDS if is_normal else _CLOSE_AFTER_ERROR_SECONDS)

    def open(self) -> None:
        """Called before the first one is told, and again until it raises no error. Each error is logged."""

    def tell(self, view: CheckpointView) -> None:
        """Tells the tool of one. Any error is logged."""
        raise NotImplementedError

    def _work(self) -> None:
        is_open = self._asked(self.open, f"of {self.run}")
        self._begun.set()
        while (saved := self._saves.get()) is not None:
            # Waits: a save is over a moment before its handle hears of it, and close() must not come between.
            if isinstance(saved, SaveHandle) and saved.committed.exception() is not None:
                continue
            view = saved.committed.result() if isinstance(saved, SaveHandle) else saved
            if view.health is Health.OK:
                what = f"of step {view.step} of {self.run}"
                is_open = is_open or self._asked(self.open, what)
                if is_open:
                    self._asked(partial(self.tell, view), what)

    def _asked(self, ask: Callable[[], object], what: str) -> bool:
        try:
            ask()
        except Exception as error:  # whatever the tool raises, the job goes on
            # Its message may have the address of the tool, with a password in it.
            log.warning("%s was not told %s: %s", self.tool, what, _CREDENTIALS.sub("//", str(error)))
            return False
        return True


def reference(run: str, view: CheckpointView) -> dict[str, Any]:
    """What a tool keeps of a checkpoint, in JSON's types: where it is, and by which digest its bytes are known."""
    return {
        "url": url_of(run, view),
        "run": run,
        "step": view.step,
        "id": view.id,
        "digest": view.digest,
        "attempt": view.attempt,
        "logical_bytes": view.logical_bytes,
        "metrics": {name: each.nonfinite or each.value for name, each in view.metrics.items()},
    }


def url_of(run: str, view: CheckpointView) -> str:
    """By its id: after a rollback another checkpoint may have its step."""
    return f"holdfast://{run}@{view.id}"
