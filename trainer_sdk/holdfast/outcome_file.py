"""Tells `holdfast run` which attempt this rank has and how it ended: beside the session, in a folder of the launch.

Without `holdfast run` around the job there is no folder, and nothing is written.
"""

from __future__ import annotations

import logging
import uuid

from holdfast.settings import TrainerSettings
from holdfast_client.outcome_notes import OutcomeNote, write_note
from holdfast_protocol.selectors import RunName
from holdfast_protocol.states import AttemptOutcome

log = logging.getLogger("holdfast")


class OutcomeFile:
    """This rank's word on this job's attempt."""

    def __init__(self, run: RunName, rank: int, settings: TrainerSettings) -> None:
        self._run = run
        self._rank = rank
        self._folder = settings.outcome_dir
        self._launch = settings.launch
        self._attempt = 0

    def new_launch_id(self) -> str:
        """One per process. It begins with the launch's own id, for who looks for its attempts in the catalog."""
        own = uuid.uuid4().hex
        return f"{self._launch}.{own}" if self._launch else own

    def opened(self, attempt: int) -> None:
        self._attempt = attempt
        self._write(None, "")

    def ended(self, outcome: AttemptOutcome, detail: str) -> None:
        self._write(outcome, detail)

    def _write(self, outcome: AttemptOutcome | None, detail: str) -> None:
        if self._folder is None:
            return
        note = OutcomeNote(
            project=self._run.project,
            run=self._run.run,
            attempt=self._attempt,
            rank=self._rank,
            outcome=outcome,
            detail=detail[:1000],
        )
        try:
            write_note(self._folder, note)
        except OSError as error:
            # The training goes on, and `holdfast run` asks the catalog.
            log.warning("`holdfast run` could not be told of this attempt (%s)", error.strerror or error)
