"""A launch of a job: it opens its attempt, and leaves notes of how it ended for `holdfast launch`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from holdfast_client.client import Client
from holdfast_client.errors import AttemptConflict, NotFound, StaleAttempt
from holdfast_protocol.attempts import AttemptOpened, OpenAttempt
from holdfast_protocol.runs import RunName
from holdfast_protocol.states import AttemptOutcome

# Opens the attempt of a launch: compare-and-swap on the newest attempt (rule attempt-compare-and-swap). Rank 0 does it.
#
# A later launch wins over an earlier one. A late retry of an earlier launch must not fence its successor: if our own
# opening may have been carried out and another attempt is newer now, then that one is our successor, and we stop.

log = logging.getLogger("holdfast.client")

TRIES = 5


def open_attempt(
    client: Client,
    run_name: RunName,
    launch_id: str,
    *,
    world_size: int,
    host: str = "",
    environment: dict[str, str] | None = None,
    create: bool | None = None,
) -> AttemptOpened:
    """Opens an attempt after the newest one. Raises StaleAttempt if a later launch has taken over in between,
    RunNotFound or ProjectNotFound if they may not be made (see OpenAttempt.create)."""
    after = _newest_attempt(client, run_name)
    for tries_left in reversed(range(TRIES)):
        request = OpenAttempt(
            launch_id=launch_id,
            after=after,
            world_size=world_size,
            host=host,
            environment=environment or {},
            create=create,
        )
        try:
            return client.attempts.open(run_name.project, run_name.run, request)
        except AttemptConflict as conflict:
            if conflict.earlier_try_ambiguous:
                raise StaleAttempt(
                    f"Launch {launch_id} of {run_name} lost the reply to its opening, and a later attempt is open now",
                    request_id=conflict.request_id,
                    context=conflict.context,
                ) from conflict
            if not tries_left:
                raise
            after = _newest_attempt(client, run_name)
            log.info("another attempt of %s was opened in between; opening after %d", run_name, after)
    raise AssertionError("the last try returns or raises")


def _newest_attempt(client: Client, run_name: RunName) -> int:
    """0 where there is none yet. The list of attempts is open to a token that may only train."""
    try:
        newest_first = client.attempts.list(run_name.project, run_name.run, limit=1).items
    except NotFound:
        return 0
    return newest_first[0].number if newest_first else 0


# What a job leaves for `holdfast launch` in HOLDFAST_OUTCOME_DIR: which attempt each rank had, and how it ended.
#
# One file per attempt and rank, written by the SDK (holdfast.session.heartbeat) and read by the command around it
# (cli/run/). The catalog knows the outcome too; the files tell it when the service is away, and which attempts are
# ours.

LAUNCH = "HOLDFAST_LAUNCH"
OUTCOME_DIR = "HOLDFAST_OUTCOME_DIR"

_SUFFIX = ".outcome.json"


class OutcomeNote(BaseModel):
    """One rank's word on one attempt. Rank 0's is the job's."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    project: str
    run: str
    attempt: int
    """0: the launch was fenced before it had one."""
    rank: int
    """-1: nobody's word, only known from the catalog."""
    outcome: AttemptOutcome | None = None
    """None: opened, and not ended as far as this rank could tell."""
    detail: str = ""

    @property
    def run_name(self) -> RunName:
        return RunName(self.project, self.run)


def write_note(folder: Path, note: OutcomeNote) -> None:
    """Whole or not at all, also for who reads meanwhile. Replaces this rank's earlier word. Raises OSError."""
    name = f"{note.project}.{note.run}.{note.attempt}.{note.rank}"
    unfinished = folder / f"{name}.{os.getpid()}.tmp"
    unfinished.write_text(note.model_dump_json(), encoding="utf-8")
    unfinished.replace(folder / f"{name}{_SUFFIX}")


def read_notes(folder: Path) -> list[OutcomeNote]:
    """All there are. What is no note is left out: it tells nothing, and the catalog is asked then."""
    notes = []
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            notes.append(OutcomeNote.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            continue
    return notes
