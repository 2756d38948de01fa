"""When to kill: moments that are read from the catalog and the journal, never guessed by sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from checks import CheckFailedError
from journal import read_journal
from launches import Launch

from holdfast_client import Client
from holdfast_protocol.base import RunName
from holdfast_protocol.checkpoints import CheckpointView
from holdfast_protocol.copies import DrillResult
from holdfast_protocol.states import CheckpointState

_LOOK_EVERY_SECONDS = 0.01
_LAUNCH_SECONDS = 240
_COPIED_SECONDS = 120


class LaunchFailedError(Exception):
    """A launch ended or hung when it should have gone on. `said`: its last lines."""

    def __init__(self, what: str, said: list[str]) -> None:
        super().__init__(f"{what}: {said[-1]}" if said else what)
        self.said = said


class Catalog:
    """The run as the service sees it."""

    def __init__(self, client: Client, run: RunName) -> None:
        self._client, self._run = client, run

    def uploading(self) -> CheckpointView | None:
        return self._newest(CheckpointState.UPLOADING)

    def committed(self) -> CheckpointView | None:
        return self._newest(CheckpointState.COMMITTED)

    def state_of(self, checkpoint: CheckpointView) -> CheckpointState:
        return self._client.checkpoints.get(checkpoint.id).state

    def restore_step(self) -> int | None:
        """The step that the service would restore now."""
        point = self._client.restores.restore_point(self._run.project, self._run.run).restore_point
        return None if point is None else point.step

    def drill(self) -> DrillResult:
        """A restore from the second store alone, as soon as that has what the policy wants there."""
        project, run = self._run.project, self._run.run
        deadline = time.monotonic() + _COPIED_SECONDS
        while (copies := self._client.copies.of_run(project, run)).waiting:
            if time.monotonic() > deadline:
                raise CheckFailedError(f"{copies.waiting} checkpoints were not copied after {_COPIED_SECONDS} s")
            time.sleep(_LOOK_EVERY_SECONDS)
        operation = self._client.operations.wait(self._client.copies.drill(project, run).id)
        if operation.result is None:
            raise CheckFailedError(f"the drill from the second store alone failed: {operation.error}")
        return DrillResult.model_validate(operation.result)

    def _newest(self, state: CheckpointState) -> CheckpointView | None:
        page = self._client.checkpoints.list(self._run.project, self._run.run, state=state, limit=1)
        return page.items[0] if page.items else None


def between_saves(catalog: Catalog, journal: Path, launch_number: int) -> bool:
    """This launch has trained past the newest committed checkpoint, one that is its own, and uploads nothing."""
    launches = read_journal(journal)
    if len(launches) < launch_number or launches[-1].last_step is None:
        return False
    committed = catalog.committed()
    return (
        committed is not None
        and launches[-1].start <= committed.step < launches[-1].last_step
        and catalog.uploading() is None
    )


def wait_for(launch: Launch, moment: Callable[[], bool], tick: Callable[[], None]) -> bool:
    """True when the moment came; False when the launch finished before it. Raises LaunchFailedError."""
    deadline = time.monotonic() + _LAUNCH_SECONDS
    while True:
        if moment():
            return True
        tick()
        if launch.exit_code is not None:
            if launch.exit_code != 0:
                raise LaunchFailedError(f"torchrun ended with exit code {launch.exit_code}", launch.last_words)
            return False
        if time.monotonic() > deadline:
            raise LaunchFailedError(f"torchrun was not done after {_LAUNCH_SECONDS} s", launch.last_words)
        time.sleep(_LOOK_EVERY_SECONDS)
