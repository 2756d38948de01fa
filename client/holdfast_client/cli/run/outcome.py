"""How the last attempt of this launch ended: from the job's own notes, else from the catalog.

Rank 0's word is the job's. Where rank 0 is on another node, the catalog has it; where the service is away as well, what
this node's ranks have told of themselves must do. Where there are no notes at all, HOLDFAST_RUN says whom to look up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast_client.client import Client
from holdfast_client.errors import HoldfastError
from holdfast_client.outcome_notes import OutcomeNote
from holdfast_protocol.selectors import RunName
from holdfast_protocol.states import AttemptOutcome

Asked = tuple[AttemptOutcome | None, str]
"""What the catalog says of an attempt: its outcome, and a detail."""

_GRAVEST_FIRST = (
    AttemptOutcome.FENCED,
    AttemptOutcome.PREEMPTED,
    AttemptOutcome.FAILED,
    AttemptOutcome.LOST,
    None,
    AttemptOutcome.FINISHED,
)
_ASK_AGAIN_SECONDS = 1.0
_LATELY = 20
"""Attempts of others that may have been opened since."""


@dataclass(frozen=True)
class Outcome:
    """Of the last attempt of one run. `outcome` is None where nobody has told it."""

    run: RunName
    attempt: int
    outcome: AttemptOutcome | None
    detail: str = ""


def outcome_of_launch(
    notes: Sequence[OutcomeNote], ask: Callable[[RunName, int], Asked | None], patience_seconds: float
) -> Outcome | None:
    """The gravest of the launch's runs; None where no attempt was opened, so that Holdfast knows nothing of this job.

    `ask`: what the catalog says of an attempt; None where it cannot be asked. It is asked again for as long as rank 0,
    on another node, may still be about to tell it.
    """
    runs = {note.run_name for note in notes}
    outcomes = [_of_run(run, [note for note in notes if note.run_name == run], ask, patience_seconds) for run in runs]
    return min(outcomes, key=lambda found: _GRAVEST_FIRST.index(found.outcome), default=None)


def last_attempt(notes: Sequence[OutcomeNote]) -> list[OutcomeNote]:
    """This node's words on the last attempt of one run. One that was fenced before it had a number comes last."""
    number = max(note.attempt or 1 << 62 for note in notes)
    return [note for note in notes if (note.attempt or 1 << 62) == number]


def notes_from_catalog(client: Client, run: RunName, launch: str) -> list[OutcomeNote]:
    """The last attempt of this launch, where the ranks could leave no note, behind srun or in another container. Its
    outcome is asked for afterwards. Empty where there is none, or the service is away."""
    try:
        newest_first = client.attempts(run.project, run.run, limit=_LATELY).items
    except HoldfastError:
        return []
    ours = (attempt.number for attempt in newest_first if attempt.launch_id.startswith(f"{launch}."))
    return [OutcomeNote(project=run.project, run=run.run, attempt=number, rank=-1) for number in ours][:1]


def catalog_of(client: Client) -> Callable[[RunName, int], Asked | None]:
    def ask(run: RunName, attempt: int) -> Asked | None:
        try:
            found = client.attempt(run.project, run.run, attempt)
        except HoldfastError:
            return None
        # Left by its own job, and its ranks here know of no other: nobody else has the run.
        left = found.outcome is AttemptOutcome.FENCED and found.rolled_back_at is not None
        return AttemptOutcome.FAILED if left else found.outcome, found.outcome_detail or ""

    return ask


def _of_run(
    run: RunName,
    notes: Sequence[OutcomeNote],
    ask: Callable[[RunName, int], Asked | None],
    patience_seconds: float,
) -> Outcome:
    last = last_attempt(notes)
    attempt = last[0].attempt
    first = next((note for note in last if note.rank == 0), None)
    if attempt == 0 or (first is not None and first.outcome is not None):
        word = first or last[0]
        return Outcome(run, attempt, word.outcome, word.detail)
    # A rank 0 of this node has ended and said nothing: nobody else will tell for it soon.
    until = time.monotonic() + (0.0 if first is not None else patience_seconds)
    while (asked := ask(run, attempt)) is not None:
        outcome, detail = asked
        if outcome is not None:
            return Outcome(run, attempt, outcome, detail)
        if time.monotonic() >= until:
            break
        time.sleep(_ASK_AGAIN_SECONDS)
    told = [note for note in last if note.outcome is not None]
    word = min(told, key=lambda note: _GRAVEST_FIRST.index(note.outcome), default=last[0])
    return Outcome(run, attempt, word.outcome, word.detail)
