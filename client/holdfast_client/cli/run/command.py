"""`holdfast run -- torchrun … train.py`: starts the job, sends signals on, and ends with a documented exit code."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from holdfast_client.cli.connect import connect
from holdfast_client.cli.run.child import Child
from holdfast_client.cli.run.ending import ending_of
from holdfast_client.cli.run.launcher import environment_of_child, is_preemption, is_torchrun, signal_for_child
from holdfast_client.cli.run.outcome import (
    Outcome,
    catalog_of,
    last_attempt,
    notes_from_catalog,
    outcome_of_launch,
)
from holdfast_client.cli.say import show_note
from holdfast_client.errors import HoldfastError
from holdfast_client.outcome_notes import read_notes
from holdfast_protocol.counted import counted
from holdfast_protocol.selectors import SelectorError, parse_run
from holdfast_protocol.states import AttemptOutcome

_RUN = "HOLDFAST_RUN"
_DO_NOT_RESTART = (AttemptOutcome.FENCED, AttemptOutcome.PREEMPTED)
_LEFT_TIME_SECONDS = 1.0
"""From the last rank's word to the end of its process."""
_STRAGGLERS_SECONDS = 10.0
_AFTER_GRACE_SECONDS = 5.0
"""torchrun kills ranks that have not left when the grace is over, and then ends."""
_CATALOG_SECONDS = 30.0
"""How long rank 0, on another node, has to tell the catalog once this node's part has ended."""
_CATALOG_SECONDS_LEAVING = 3.0
"""Where the job was told to end: soon somebody ends us too, and it is launched again in any case but one."""


def register(app: typer.Typer) -> None:
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="For example torchrun … train.py.")],
    grace: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="How long the job has from a signal until it is killed: the batch system's own number. The ranks save "
            "within it, and torchrun waits for them so long.",
        ),
    ] = 30,
) -> None:
    """Run a training job, and end with an exit code that a batch system can act on.

    0: finished. 75: preempted, launch it again. 76: nobody told how it ended. 79: another launch has the run, do not
    launch this one again. Else the job's own. SIGTERM and SIGUSR1 reach its ranks as a notice to save and leave, under
    torchrun too. What has not ended some seconds after the grace is killed.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-run-") as folder:
        job = _Job(command, Path(folder), grace)
        status = job.wait()
        ending = ending_of(status, job.outcome(), asked_to_end=job.asked_to_end)
    show_note(f"holdfast run: {ending.what} Exit code {ending.code}.")
    raise typer.Exit(ending.code)


class _Job:
    def __init__(self, command: Sequence[str], folder: Path, grace_seconds: int) -> None:
        self.asked_to_end = False
        self._kill_at: float | None = None
        self._grace_seconds = grace_seconds
        self._folder = folder
        self._torchrun = is_torchrun(command)
        self._told_at: float | None = None
        self._launch = uuid.uuid4().hex
        environment = environment_of_child(os.environ, self._launch, str(folder), grace_seconds)
        self._child = Child(command, environment)

    def wait(self) -> int:
        return self._child.wait(self._send_on, self._tick)

    def outcome(self) -> Outcome | None:
        """How the job ended; None where it opened no attempt."""
        notes = read_notes(self._folder)
        patience_seconds = _CATALOG_SECONDS_LEAVING if self.asked_to_end else _CATALOG_SECONDS
        run = os.environ.get(_RUN)
        if not notes and not run:
            return None
        try:
            with connect() as client:
                if not notes and run:
                    notes = notes_from_catalog(client, parse_run(run), self._launch)
                return outcome_of_launch(notes, catalog_of(client), patience_seconds)
        except (HoldfastError, SelectorError):
            # A setting is wrong, and nobody can be asked.
            return outcome_of_launch(notes, lambda _run, _attempt: None, patience_seconds)

    def _send_on(self, number: int) -> None:
        translated = signal_for_child(number, torchrun=self._torchrun, already_asked=self.asked_to_end)
        if is_preemption(number, torchrun=self._torchrun) and not self.asked_to_end:
            self.asked_to_end = True
            self._kill_at = time.monotonic() + self._grace_seconds + _AFTER_GRACE_SECONDS
        if translated is not None:
            self._child.send(translated)

    def _tick(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            show_note(
                f"holdfast run: The job was told to end, and has not within {counted(self._grace_seconds, 'second')} "
                "(--grace) "
                f"and {_AFTER_GRACE_SECONDS:.0f} more. It is killed."
            )
            self._child.kill()
        if self._torchrun:
            self._stop_restarts()

    def _stop_restarts(self) -> None:
        """torchrun takes whoever leaves for a crash and starts its workers again (--max-restarts): on a machine that
        is about to go, or against the launch that has taken over. Once the ranks have told, it is ended."""
        if self.asked_to_end:
            return
        notes = read_notes(self._folder)
        told = [
            [note.outcome for note in last_attempt([note for note in notes if note.run_name == run])]
            for run in {note.run_name for note in notes}
        ]
        leaving = [outcomes for outcomes in told if any(outcome in _DO_NOT_RESTART for outcome in outcomes)]
        if not leaving:
            self._told_at = None
            return
        self._told_at = self._told_at or time.monotonic()
        all_told = all(outcome is not None for outcomes in leaving for outcome in outcomes)
        if time.monotonic() - self._told_at >= (_LEFT_TIME_SECONDS if all_told else _STRAGGLERS_SECONDS):
            self._send_on(signal.SIGTERM)
