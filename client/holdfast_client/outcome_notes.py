"""The notes that a job leaves for `holdfast launch` in HOLDFAST_OUTCOME_DIR: each rank's attempt, and its outcome.

One file per attempt and rank, written by the SDK (holdfast.session.session) and read by the command around it
(cli/launch.py). The catalog knows the outcome too. The files also work while the service is unavailable, and tell which
attempts belong to this launch.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast_protocol.base import RunName
from holdfast_protocol.states import AttemptOutcome

LAUNCH = "HOLDFAST_LAUNCH"
OUTCOME_DIR = "HOLDFAST_OUTCOME_DIR"

_SUFFIX = ".outcome.json"


class OutcomeNote(BaseModel):
    """One rank's report on one attempt. Rank 0's is the job's."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    project: str
    run: str
    attempt: int
    """0: the launch was fenced before it had an attempt."""
    rank: int
    """-1: no rank's report, only known from the catalog."""
    outcome: AttemptOutcome | None = None
    """None: opened, and not ended as far as this rank could tell."""
    detail: str = ""

    @property
    def run_name(self) -> RunName:
        return RunName(self.project, self.run)


def write_note(folder: Path, note: OutcomeNote) -> None:
    """Atomic, also for a concurrent reader. Replaces this rank's earlier note. Raises OSError."""
    name = f"{note.project}.{note.run}.{note.attempt}.{note.rank}"
    unfinished = folder / f"{name}.{os.getpid()}.tmp"
    unfinished.write_text(note.model_dump_json(), encoding="utf-8")
    unfinished.replace(folder / f"{name}{_SUFFIX}")


def read_notes(folder: Path) -> list[OutcomeNote]:
    """All notes of the folder. Other files are left out; the launcher then asks the catalog."""
    notes = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            notes.append(OutcomeNote.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return notes
