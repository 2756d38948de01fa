"""Attempts: one incarnation of a training job. Opening one fences every older one (protocol rules 1 to 3).

`POST /v1/projects/{project}/runs/{run}/attempts`              OpenAttempt   -> AttemptOpened
`GET  /v1/projects/{project}/runs/{run}/attempts[/{number}]`                 -> Page[AttemptView] | AttemptView
`PUT  .../attempts/{number}/resumed-from`                      ResumedFrom   -> AttemptView
`POST .../attempts/{number}/heartbeat`                         Heartbeat     -> HeartbeatReply
`POST .../attempts/{number}/end`                               EndAttempt    -> AttemptView
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from holdfast_protocol.base import LARGEST_INTEGER, Reply, Request
from holdfast_protocol.fencing import Fence
from holdfast_protocol.restore import PassedOver, RestorePoint
from holdfast_protocol.states import AttemptOutcome

LaunchId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class OpenAttempt(Request):
    launch_id: LaunchId = Field(description="One per launch: the same launch_id gets the same attempt back.")
    after: int = Field(ge=0, description="The newest attempt that this launch knows of; compare-and-swap.")
    world_size: int = Field(ge=1, le=100_000)
    host: str = Field(default="", max_length=255)
    environment: dict[str, str] = Field(default_factory=dict, description="Versions and hardware, for people.")
    create: bool | None = Field(
        default=None,
        description="True: make project and run if they are not there. False: refuse. None: make the run, unless its "
        "name looks like a mistyped one of a run that has checkpoints.",
    )


class AttemptOpened(Reply):
    attempt: int
    epoch: int
    run_id: str
    restore_point: RestorePoint | None
    passed_over: list[PassedOver] = Field(description="Newer checkpoints that were not taken, and why.")
    ever_committed: bool = Field(description="False only if nothing was ever committed in this run.")
    note: str = Field(default="", description="A sentence for people, where a store does not answer.")
    save_interval_seconds: float = Field(description="The recommended time between two saves.")
    heartbeat_interval_seconds: float


class AttemptView(Reply):
    number: int
    launch_id: str
    world_size: int
    host: str
    environment: dict[str, str]
    opened_at: datetime
    heartbeat_at: datetime | None
    last_step: int | None
    ended_at: datetime | None
    outcome: AttemptOutcome | None
    outcome_detail: str | None
    resumed_from: str | None = Field(description="Checkpoint id.")


class ResumedFrom(Fence):
    """What the ranks have really loaded; the line of descent follows it (protocol rule 3)."""

    checkpoint_id: str | None
    rollback: bool = Field(default=False, description="True cuts the line here: what came after is never latest.")


class Heartbeat(Fence):
    step: int | None = Field(default=None, ge=0, le=LARGEST_INTEGER)


class HeartbeatReply(Reply):
    save_interval_seconds: float


class EndAttempt(Fence):
    outcome: AttemptOutcome
    detail: str = Field(default="", max_length=4000)
