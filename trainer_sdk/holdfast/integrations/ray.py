"""Ray Train: restore points as Ray's own checkpoints, by reference. The workers save and restore as in any other job.

    checkpointer.step(…) -> handle -> report(metrics, handle) -> ray.train.report() with a folder of one small file

Ray then has something to keep, to score and to return as `Result.checkpoint`, and no byte of the state goes through its
storage. Written against Ray 2.60.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from holdfast.errors import ConfigurationError
from holdfast.integrations.restore_points import reference
from holdfast.save.job import SaveHandle
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.states import Health

_FILE = "holdfast.json"


class RayRestorePoints:
    """In the function that Ray calls on each worker, on every worker alike:

        with RayRestorePoints("demo/gpt") as points, holdfast.Checkpointer("demo/gpt") as checkpointer:
            for step in range(checkpointer.restore(state), steps):
                ...
                handle = checkpointer.step(step, state, metrics={"loss": loss})
                points.report({"loss": loss.item()}, handle)

    run: `project/run`, as for the Checkpointer.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._is_first = ray.train.get_context().get_world_rank() == 0
        self._saves: deque[tuple[SaveHandle, dict[str, Any]]] = deque()
        """On the first worker: those that are not reported yet, with the metrics of their steps."""
        self._has_saved = False
        self._metrics: dict[str, Any] = {}

    def report(self, metrics: Mapping[str, Any], handle: SaveHandle | None = None) -> None:
        """ray.train.report(), in its place: once in each step, on every worker, because it waits for all of them.

        `handle`: what step() or save() returned. A save is reported when it is committed, by a later call, one by each.
        That call tells Ray the metrics of the save's own step, in the place of `metrics`: Ray scores checkpoints by
        these. A save that failed or has diverged is never reported."""
        if handle is not None:
            self._has_saved = True
            if self._is_first:
                self._saves.append((handle, dict(metrics)))
        self._metrics = dict(metrics)
        self._report(self._metrics, self._next_committed())

    def close(self) -> None:
        """Waits for the last saves, and reports each that no call has reported. On every worker, after the last
        step."""
        if not self._has_saved:
            return
        for handle, _ in self._saves:
            handle.committed.exception()
        saved = list(iter(self._next_committed, None))
        # All must report equally often, and only the first knows how often.
        for at in range(broadcast_from_rank_zero(len(saved))):
            self._report(self._metrics, saved[at] if self._is_first else None)

    def _next_committed(self) -> tuple[CheckpointView, dict[str, Any]] | None:
        """The oldest that is not reported yet; None while that one is under way."""
        while self._saves and self._saves[0][0].committed.done():
            handle, metrics = self._saves.popleft()
            if handle.committed.exception() is None and (view := handle.committed.result()).health is Health.OK:
                return view, metrics
        return None

    def _report(self, metrics: dict[str, Any], saved: tuple[CheckpointView, dict[str, Any]] | None) -> None:
        if saved is None:
            ray.train.report(metrics)
            return
        view, metrics = saved
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _FILE).write_text(json.dumps(reference(self.run, view), indent=2), encoding="utf-8")
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # else another worker may never come to its own report
            self.close()


def url_in(checkpoint: ray.train.Checkpoint) -> str:
    """The URL of a checkpoint that a RayRestorePoints has reported: of `Result.checkpoint`, of one of
    `Result.best_checkpoints`, or of what `ray.train.get_checkpoint()` returns. `holdfast.load_pretrained(url)`, and all
    else that reads by URL, takes it. Raises ConfigurationError for any other checkpoint."""
    with checkpoint.as_directory() as folder:
        try:
            return str(json.loads((Path(folder) / _FILE).read_text(encoding="utf-8"))["url"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{checkpoint.path} has no reference to a checkpoint of Holdfast in it ({type(error).__name__})."
            ) from None
