"""Tells a tracking tool of the restore points of a job: what MLflow and Weights & Biases have in common.

    checkpointer.step(…) -> handle -> log(handle) -> committed and healthy -> a thread of its own -> the tool

The tool is asked on that thread alone. If it is slow or unavailable, neither training nor saving waits, and the log has
a warning.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from holdfast.save.job import SaveHandle
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import Health

log = logging.getLogger("holdfast")

_CLOSE_SECONDS = 60.0


class RestorePointLog:
    """On rank 0. On the other ranks log() and close() do nothing."""

    tool = ""

    def __init__(self, run: str) -> None:
        self.run = run
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._views: queue.SimpleQueue[CheckpointView | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"holdfast-{self.tool}", daemon=True)
        if self.is_first:
            self._thread.start()

    def log(self, handle: SaveHandle | None) -> SaveHandle | None:
        """Takes what step() and save() return, and returns it. The tool hears of it once it can be resumed from; of a
        save that failed or has diverged it never does."""
        if handle is not None and self.is_first:
            handle.committed.add_done_callback(self._over)
        return handle

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Waits, within bounds, until the tool was told of all that is committed. Call it after the Checkpointer's own
        end, which waits for the last save."""
        if self.is_first:
            self._views.put(None)
            self._thread.join(timeout_seconds)

    def tell(self, view: CheckpointView) -> None:
        """Tells the tool of one. Any error is logged."""
        raise NotImplementedError

    def _over(self, committed: Future[CheckpointView]) -> None:
        if committed.exception() is None and committed.result().health is Health.OK:
            self._views.put(committed.result())

    def _work(self) -> None:
        while (view := self._views.get()) is not None:
            try:
                self.tell(view)
            except Exception as error:  # whatever the tool raises, the job goes on
                log.warning("%s was not told of step %d of %s: %s", self.tool, view.step, self.run, error)


def reference(run: str, view: CheckpointView) -> dict[str, Any]:
    """What a tool keeps of a checkpoint: where it is, and by which digest its bytes are known. No byte of it."""
    return {
        "url": url_of(run, view),
        "run": run,
        "step": view.step,
        "id": view.id,
        "digest": view.digest,
        "attempt": view.attempt,
        "logical_bytes": view.logical_bytes,
        "metrics": dict(view.metrics),
    }


def url_of(run: str, view: CheckpointView) -> str:
    """By its id: after a rollback another checkpoint may have its step."""
    return f"holdfast://{run}@{view.id}"
