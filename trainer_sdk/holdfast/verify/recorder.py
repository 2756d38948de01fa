"""In a script that `holdfast verify-resume` launched: records this rank at each step boundary, and stops it.

Flow: checkpointer (run, restored, stepped) -> **recorder** -> fingerprints, surroundings -> records, in the folder
HOLDFAST_VERIFY_DIR. At its last boundary a rank waits for the command's SIGKILL. Every one of these launches ends so,
because a `finally` of the script must not write a result of a cut-off training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.distributed.ranks import Ranks
from holdfast.errors import ConfigurationError
from holdfast.save.job import SaveHandle
from holdfast.state.components import Declarations
from holdfast.verify.fingerprints import rng_fingerprint, state_fingerprint
from holdfast.verify.iterators import IteratorBook
from holdfast.verify.orders import LaunchOrder, Place, places
from holdfast.verify.records import Boundary, Snapshot, append_boundary, append_restored, trail_file
from holdfast.verify.surroundings import Surroundings
from holdfast_protocol.base import RunName

_COMMIT_SECONDS = 600.0
_LOOK_SECONDS = 0.2


class Recorder:
    """For the one Checkpointer that the script makes."""

    def __init__(self, folder: Path, ranks: Ranks, declared: Declarations) -> None:
        self._folder = folder
        self._order = LaunchOrder.read(folder)
        self._ranks = ranks
        self._declared = declared
        self._place = Place.here(ranks.rank, ranks.world_size)
        self._file = trail_file(folder, ranks.rank)
        self._steps: list[int] = []
        self._iterators = IteratorBook()
        if any(place.pid == self._place.pid for place in places(folder, "began")):
            raise ConfigurationError(
                "`holdfast verify-resume` follows one Checkpointer, and this script makes a second one. "
                "Let the script make only the one that restores and saves the state of the training."
            )
        self._place.note(folder, "began")

    def run(self, own: RunName) -> RunName:
        """The throw-away run that stands for the script's own."""
        return RunName(own.project, self._order.run_name(own.run))

    def restored(self, start: int, state: Mapping[str, Any]) -> None:
        """restore() is over, and returns `start`."""
        append_restored(self._file, start, self._look(state))

    def saves_at(self, step: int) -> bool:
        """Whether step() must save now. Only the order decides, not the script's own interval."""
        return self._order.save_at_stop and self._order.is_last(len(self._steps) + 1, step)

    def stepped(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None, handle: SaveHandle | None
    ) -> None:
        """A step is over, and `handle` is its save if there is one. Does not return at the launch's last boundary."""
        if step in self._steps:
            return  # saved by step() and again by save(), but one boundary
        self._steps.append(step)
        # A rank's own state_dict() may be a collective, and all ranks are here.
        append_boundary(self._file, Boundary(step, _texts(metrics), self._look(state)))
        if self._order.is_last(len(self._steps), step):
            if handle is not None and self._order.save_at_stop:
                handle.committed.result(timeout=_COMMIT_SECONDS)
            self._park()

    def _look(self, state: Mapping[str, Any]) -> Snapshot:
        found, tensors = state_fingerprint(
            state, rank=self._ranks.rank, world_size=self._ranks.world_size, declared=self._declared
        )
        rng = rng_fingerprint()
        around = Surroundings(sys._getframe(1), state)
        return Snapshot(
            found, tensors, rng, around.outside, locals=around.locals, batches=self._iterators.batches_given()
        )

    def _park(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._place.note(self._folder, "parked")
        while _is_there(self._order.watcher_pid):
            time.sleep(_LOOK_SECONDS)
        os._exit(1)


def _texts(metrics: Mapping[str, Any] | None) -> dict[str, str]:
    values = {
        name: value.item() if isinstance(value, torch.Tensor) else value for name, value in (metrics or {}).items()
    }
    return {str(name): repr(float(value)) for name, value in values.items()}


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
