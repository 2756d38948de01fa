"""Goodput: how much of a run's time went into steps that it still has.

`GET /v1/projects/{project}/runs/{run}/goodput`  -> Goodput
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from holdfast_protocol.base import Reply
from holdfast_protocol.states import AttemptOutcome


class SpentTime(Reply):
    """Seconds, of an attempt or of a run; all but `wall_seconds` add up to it."""

    wall_seconds: float = Field(description="From its opening to its end; of a run from the first to the last.")
    productive_seconds: float = Field(description="In steps that the run still has.")
    lost_seconds: float = Field(description="In steps that were run and lost.")
    saving_seconds: float = Field(description="Training stood still for saves.")
    restoring_seconds: float
    restarting_seconds: float = Field(
        description="From the end of the attempt before, or its last sign, to the first step, without restoring."
    )
    idle_seconds: float = Field(
        description="The rest: after the last step that ended (hanging, draining, telling), and after a finished "
        "attempt until the next."
    )
    steps_run: int
    steps_kept: int = Field(description="Those that lie on the line of descent of what the run is now.")
    steps_lost: int


class AttemptGoodput(SpentTime):
    """With the time before it, since the attempt before."""

    attempt: int
    outcome: AttemptOutcome | None
    resumed_from_step: int | None
    last_step: int | None
    step_seconds: float | None = Field(description="Of one step, without saves. Null: not known.")


class Goodput(SpentTime):
    goodput: float | None = Field(description="productive_seconds / wall_seconds. Null while no step's time is known.")
    since: datetime | None
    until: datetime | None = Field(description="The end of the last attempt, or now.")
    attempts: list[AttemptGoodput] = Field(description="The oldest first.")
