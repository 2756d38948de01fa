"""Copies in a second store: which checkpoints get one (a policy of kind `copies`), how far behind it is, and drills.

`GET  /v1/projects/{project}/copies`              -> Page[RunCopies]
`GET  /v1/projects/{project}/runs/{run}/copies`   -> RunCopies
`POST /v1/projects/{project}/runs/{run}/drills`   StartDrill -> OperationView, whose result is a DrillResult
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from holdfast_protocol.base import LARGEST_INTEGER, Label, Reply, Request
from holdfast_protocol.restore import PassedOver
from holdfast_protocol.retention import KeepBest
from holdfast_protocol.states import CheckpointKind, StoreRole


class CopyPolicy(Request):
    """What gets a copy in the second store. Without a condition every checkpoint; with some, whatever meets one.

    What the policy no longer wants keeps the copy that it has, until the checkpoint itself goes."""

    labels: list[Label] = Field(default_factory=list, max_length=50, description="Whatever has one of these.")
    kinds: list[CheckpointKind] = Field(
        default_factory=list, max_length=10, description="periodic, emergency or final."
    )
    every_steps: int | None = Field(
        default=None, ge=1, le=LARGEST_INTEGER, description="Every step that is a multiple of n."
    )
    best: KeepBest | None = Field(
        default=None, description="What is among the n best finite values of a metric when it is looked at."
    )

    @property
    def wants_everything(self) -> bool:
        return not (self.labels or self.kinds or self.every_steps or self.best)


class RunCopies(Reply):
    """How far the second store is behind: what would be lost if the first one were gone now (RPO)."""

    project: str
    run: str
    store: StoreRole | None = Field(description="null: the service has no second store.")
    policy: bool = Field(description="Whether a policy asks for copies of this run.")
    newest_step: int | None = Field(description="Of the newest committed checkpoint that the policy wants.")
    newest_committed_at: datetime | None
    copied_step: int | None = Field(description="Of the newest one that is whole in the second store.")
    copied_committed_at: datetime | None
    lag_seconds: float = Field(
        description="For how long a newer state has been committed that the second store does not hold; 0: none."
    )
    lag_steps: int = Field(description="From the newest copied step to the newest wanted one.")
    lag_bytes: int = Field(description="Still to be copied; what several checkpoints lack counts in each.")
    waiting: int = Field(description="Checkpoints that are wanted there and not whole yet.")
    copied: int = Field(description="Checkpoints that are whole there.")
    error: str | None = Field(description="Why the last try failed, if it did.")


class StartDrill(Request):
    """Restore from one store alone, and verify every byte."""

    selector: str = Field(default="latest", max_length=200, description="latest, 1200, 1200#3, best:loss:min or ck_…")
    store: StoreRole = StoreRole.SECOND


class DrillResult(Reply):
    """What an operation of kind `drill` found."""

    project: str
    run: str
    store: StoreRole
    checkpoint_id: str
    step: int
    attempt: int
    logical_bytes: int
    tensors: int
    chunks: int
    bytes: int = Field(description="Of the distinct chunks, each read, decoded and hashed.")
    stored_bytes: int = Field(description="Of them, as they were read from the store.")
    seconds: float = Field(description="From the choice of the checkpoint to the last verified byte (RTO).")
    bytes_per_second: float
    newest_step: int = Field(description="Of the newest checkpoint that is committed, in whatever store.")
    rpo_seconds: float = Field(description="What the restored state is behind the newest committed one.")
    rpo_steps: int
    passed_over: list[PassedOver] = Field(description="Newer checkpoints, each with why it was not the one.")
