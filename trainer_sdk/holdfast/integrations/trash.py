"""Moves checkpoints beyond a framework's own limit to the run's trash. Below hf/ and lightning/.

A framework deletes the old one when it has written the new one. Here the new one may still be uploading, so the old one
goes after its commit. If there is none, the old one stays until the framework gives up the step of the new one too. The
service decides in the end: the two newest healthy points, and held, pinned or read checkpoints, stay and are asked for
again later. A branch that the run has left behind stays. Best effort, on a thread of its own: training never waits for
it, and never fails by it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import wait

from holdfast.errors import Forbidden, HoldfastError, NotFound
from holdfast.save.job import SaveHandle
from holdfast_client.client import Client
from holdfast_client.errors import CheckpointCold
from holdfast_client.settings import ClientSettings
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.pruning import PruneCheckpoints, PruneFilter
from holdfast_protocol.states import CheckpointState

log = logging.getLogger("holdfast")

_BRIEF_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
_SETTLE_SECONDS = 0.5
"""A save may be over a moment before its handle hears of it."""
_GONE = frozenset({CheckpointState.TRASHED, CheckpointState.DELETING, CheckpointState.DELETED})


class Trash:
    """For one run, on one rank. `reason` goes into the audit."""

    def __init__(self, settings: ClientSettings, run: RunName, reason: str) -> None:
        self._client = Client(settings.model_copy(update={"retry_seconds": _BRIEF_SECONDS}))
        self._run = run
        self._reason = reason
        self._lock = threading.Lock()
        self._due: set[int] = set()
        self._waiting: list[tuple[set[int], SaveHandle]] = []
        """Steps, and the save that takes their place."""
        self._spared: dict[int, set[int]] = {}
        """The step of a save that was not committed -> the steps whose place it should have taken."""
        self._gone: set[int] = set()
        """Steps that were in the trash once. A person may have taken one back since."""
        self._refused = False
        self._worker: threading.Thread | None = None

    def drop(self, steps: Iterable[int], after: SaveHandle | None = None) -> None:
        """These steps are no longer wanted, once `after` is committed: the save that takes their place. If that fails
        they stay until its own step is no longer wanted. Returns at once; what waits, or was refused, is looked at
        again at the next call."""
        with self._lock:
            if after is None:
                self._give_up(steps)
            else:
                self._waiting.append((set(steps), after))
            self._settle()
            if not self._due or self._refused or (self._worker is not None and self._worker.is_alive()):
                return
            self._worker = threading.Thread(target=self._empty, name="holdfast-trash", daemon=True)
            self._worker.start()

    def keep(self, step: int) -> None:
        """The step was saved again, so it is wanted again."""
        with self._lock:
            self._due.discard(step)
            self._gone.discard(step)
            for steps in [*(steps for steps, _ in self._waiting), *self._spared.values()]:
                steps.discard(step)

    def close(self) -> None:
        """Tries a last time, because the saves are over now."""
        with self._lock:
            commits = [save.committed for _, save in self._waiting]
        wait(commits, _SETTLE_SECONDS)
        if self._worker is not None:
            self._worker.join(_CLOSE_SECONDS)
        self.drop(())
        if self._worker is not None:
            self._worker.join(_CLOSE_SECONDS)
        self._client.close()

    def _settle(self) -> None:
        """The caller holds the lock."""
        waiting, self._waiting = self._waiting, []
        for steps, save in waiting:
            if not save.committed.done():
                self._waiting.append((steps, save))
            elif save.committed.exception() is None:
                self._give_up(steps)
            else:
                self._spared.setdefault(save.step, set()).update(steps - self._due)
        # A framework may name all steps beyond its limit at each save, what a failed save has spared among them.
        self._due.difference_update(self._gone, *self._spared.values())

    def _give_up(self, steps: Iterable[int]) -> None:
        """With a save that was not committed goes what it should have replaced."""
        for step in steps:
            self._due.add(step)
            self._give_up(self._spared.pop(step, ()))

    def _empty(self) -> None:
        with self._lock:
            due = sorted(self._due)
        try:
            found = {step: self._found(step) for step in due}
            gone = {step for step, view in found.items() if view and view.state in _GONE}
            missing = {step for step, view in found.items() if not view or view.state is CheckpointState.ABORTED}
            named = [view.id for view in found.values() if view and view.state is CheckpointState.COMMITTED]
            if named:
                # With a filter, protected checkpoints are left out and reported; without one a single such checkpoint
                # refuses all.
                request = PruneCheckpoints(filter=PruneFilter(), checkpoint_ids=named, reason=self._reason)
                pruned = self._client.retention.prune(self._run.project, self._run.run, request)
                gone |= {each.step for each in pruned.trashed}
            with self._lock:
                self._gone |= gone
                self._due -= gone | missing
        except Forbidden:
            self._refused = True
            log.warning(
                "older checkpoints of %s stay (%s): this job's token may not delete. Give it the scope operate, or "
                "the run a retention policy",
                self._run,
                self._reason,
            )
        except HoldfastError as error:
            log.info("older checkpoints of %s stay for now: %s", self._run, error)

    def _found(self, step: int) -> CheckpointView | None:
        """A committed one only if it is this run's restore point of the step. What is on a branch that the run has left
        stays, and so does what is cold, corrupt or in quarantine."""
        named = (self._run.project, self._run.run, str(step))
        try:
            view = self._client.checkpoints.select(*named)
            if view.state is not CheckpointState.COMMITTED:
                return view
            point = self._client.restores.restore_point(*named, diverged=True).restore_point
        except (CheckpointCold, NotFound):
            return None
        return view if point is not None and point.checkpoint_id == view.id else None
