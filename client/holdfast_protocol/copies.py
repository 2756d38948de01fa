"""Copies in a second store, scrubbing on demand, and the impact of a bad chunk.

`GET  /v1/projects/{project}/copies?late=`        -> Page[RunCopies]
`GET  /v1/projects/{project}/runs/{run}/copies`   -> RunCopies
`POST /v1/projects/{project}/runs/{run}/drills`   StartDrill -> OperationView, whose result is a DrillResult
`POST /v1/projects/{project}/runs/{run}/scrubs`   StartScrub -> OperationView, whose result is a ScrubResult
`POST /v1/checkpoints/{id}/scrubs`                StartScrub -> OperationView, whose result is a ScrubResult
`GET  /v1/chunks/{digest}/impact`                            -> Impact, over the projects that the token sees
`GET  /v1/checkpoints/{id}/impact`                           -> Impact of its bad chunks
`GET  /v1/projects/{project}/bad-copies`                     -> Page[BadCopy]
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field, model_validator

from holdfast_protocol.base import LARGEST_INTEGER, Label, Reply, Request, example
from holdfast_protocol.policies.retention import KeepBest
from holdfast_protocol.restores import Skipped
from holdfast_protocol.states import CheckpointKind, CheckpointState, CopyState, Health, Proof, StoreRole


class CopyPolicy(Request):
    """Which checkpoints get a copy in the second store: all, or with conditions those that meet one.

    A checkpoint that the policy no longer wants keeps its copy until the checkpoint itself is deleted."""

    labels: list[Label] = Field(default_factory=list, max_length=50, description="Checkpoints with one of these.")
    kinds: list[CheckpointKind] = Field(
        default_factory=list, max_length=10, description="periodic, emergency or final."
    )
    every_steps: int | None = Field(
        default=None, ge=1, le=LARGEST_INTEGER, description="Every step that is a multiple of n."
    )
    best: KeepBest | None = Field(
        default=None,
        description="Checkpoints that have one of the n best finite values of a metric, at the time of each pass.",
    )

    @property
    def wants_everything(self) -> bool:
        return not (self.labels or self.kinds or self.every_steps or self.best)


class ObjectivesPolicy(Request):
    """What a project, or a run, can bear when its first store is lost. The service does nothing by it but compare, in
    the list of copies and in the result of each drill."""

    rpo_seconds: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_INTEGER,
        description="For so long a committed state may lack a copy in the second store (RPO).",
    )
    rto_seconds: int | None = Field(
        default=None, ge=1, le=LARGEST_INTEGER, description="A restore must be done within this time (RTO)."
    )

    @model_validator(mode="after")
    def _says_something(self) -> ObjectivesPolicy:
        if self.rpo_seconds is None and self.rto_seconds is None:
            raise ValueError("give rpo_seconds, rto_seconds or both; without an objective delete the policy")
        return self


class RunCopies(Reply):
    """How far the second store is behind: the loss if the first one were gone now (RPO)."""

    project: str
    run: str
    store: StoreRole | None = Field(description="null: the service has no second store.")
    policy: bool = Field(description="Whether a policy asks for copies of this run.")
    newest_step: int | None = Field(description="The newest committed checkpoint that the policy wants.")
    newest_committed_at: datetime | None
    copied_step: int | None = Field(description="The newest one that is whole in the second store.")
    copied_committed_at: datetime | None
    lag_seconds: float = Field(
        description="Since the oldest commit that is newer than the newest whole copy that a launch would resume from; "
        "0: none."
    )
    rpo_objective_seconds: float | None = Field(
        default=None, description="As the policy of objectives has it; null: none."
    )
    rpo_seconds: float | None = Field(
        default=None,
        description="What the objective is compared with: the age of the oldest committed state that is newer than the "
        "newest whole copy that a launch would resume from, whether or not a policy wants it copied. 0: there is none. "
        "null: there is no objective.",
    )
    lag_steps: int = Field(description="From the newest copied step to the newest wanted one.")
    lag_bytes: int = Field(description="Bytes to copy; a chunk that several checkpoints need counts in each.")
    waiting: int = Field(description="Wanted checkpoints that are not whole there yet.")
    copied: int = Field(description="Checkpoints that are whole there.")
    error: str | None = Field(description="Why the last try failed, if it did.")


class StartDrill(Request):
    """Restore from one store alone, and verify every byte."""

    model_config = example({"selector": "latest", "store": "second"})

    selector: str = Field(
        default="latest",
        max_length=200,
        description="latest, 1200, 1200#3, best:loss:min or ck_…; one that is named is drilled, and no other instead.",
    )
    store: StoreRole = StoreRole.SECOND


class DrillResult(Reply):
    """The result of an operation of kind `drill`."""

    project: str
    run: str
    store: StoreRole
    checkpoint_id: str
    step: int
    attempt: int
    logical_bytes: int
    tensors: int
    chunks: int
    bytes: int = Field(description="Bytes of the distinct chunks, each read, decoded and hashed.")
    stored_bytes: int = Field(description="Their bytes as read from the store.")
    seconds: float = Field(description="From the choice of the checkpoint to the last verified byte (RTO).")
    bytes_per_second: float
    newest_step: int = Field(description="The newest committed checkpoint, in any store.")
    rpo_seconds: float = Field(description="How far the restored state is behind the newest committed one.")
    rpo_steps: int
    rto_objective_seconds: float | None = Field(
        default=None, description="As the policy of objectives had it at this drill; null: none."
    )
    rpo_objective_seconds: float | None = Field(
        default=None, description="Likewise. null too if a person chose an older checkpoint: its age is no fault."
    )
    skipped: list[Skipped] = Field(description="Newer checkpoints, each with the reason to skip it.")

    @property
    def missed(self) -> list[str]:
        """The objectives that this drill has not met: RTO, RPO."""
        compared = {
            "RTO": (self.seconds, self.rto_objective_seconds),
            "RPO": (self.rpo_seconds, self.rpo_objective_seconds),
        }
        return [name for name, (found, wanted) in compared.items() if wanted is not None and found > wanted]


class ScrubMode(StrEnum):
    READ = "read"
    """Every byte is read and hashed."""
    METADATA = "metadata"
    """Only sizes and checksums that the store reports: cheap, and blind to rot that the store does not see."""


class StartScrub(Request):
    model_config = example({"mode": "metadata"})

    mode: ScrubMode = ScrubMode.READ


class ScrubResult(Reply):
    """Counts of copies, but `lost` counts chunks and `marked` names checkpoints."""

    mode: ScrubMode
    copies: int = Field(description="Copies of the requested chunks, in all attached stores.")
    good: int
    bad: int = Field(description="Copies that have other bytes, another size, or cannot be decoded.")
    missing: int
    read_bytes: int
    repaired: int = Field(description="Bad or missing before or now, and their store has another copy that was read.")
    lost: int = Field(description="Chunks of which no attached store has a good copy.")
    cold: int = Field(description="Cannot be read before a thaw, so they were left out.")
    unread: int = Field(description="Their store did not answer, or another process was at work on them.")
    problems: dict[str, str] = Field(description="By the store's role, why it could not be read or repaired.")
    marked: list[str] = Field(description="The checkpoints that are corrupt now, as project/run@step#attempt.")


class CopyView(Reply):
    """A chunk's copy in one store."""

    store: StoreRole | None = Field(description="null: a store that this service does not have.")
    state: CopyState
    proof: Proof | None
    codec: str
    stored_bytes: int
    storage_class: str | None
    verified_at: datetime | None = Field(description="When its bytes were proven last.")
    bad_at: datetime | None
    finding: str | None = Field(description="Its defect.")
    repaired_at: datetime | None = Field(description="Since when its store has another copy that was read.")


class ChunkImpact(Reply):
    project: str
    digest: str
    bytes: int
    copies: list[CopyView]
    lost: bool = Field(description="No attached store has a good copy.")


class GoodStep(Reply):
    checkpoint_id: str
    step: int
    attempt: int


class AffectedCheckpoint(Reply):
    checkpoint_id: str
    project: str
    run: str
    step: int
    attempt: int
    state: CheckpointState
    health: Health
    lost: bool = Field(description="It needs a chunk of which no attached store has a good copy.")
    good_before: GoodStep | None = Field(description="The nearest earlier step of its run that can be restored.")
    good_after: GoodStep | None


class AffectedRun(Reply):
    project: str
    run: str
    checkpoints: int
    lost_checkpoints: int
    good_before: GoodStep | None = Field(description="Before the first affected checkpoint.")
    good_after: GoodStep | None = Field(description="After the last one.")


class Impact(Reply):
    chunks: list[ChunkImpact]
    runs: list[AffectedRun]
    checkpoints: list[AffectedCheckpoint] = Field(description="The newest steps first, run by run.")
    left_off: int = Field(description="Affected checkpoints that are not shown, because there are too many.")
    chunks_left_off: int = Field(
        default=0,
        description="Further bad chunks of the checkpoint that are not shown, nor what else they concern. What is lost "
        "is shown first.",
    )
    lost: bool = Field(description="One of them cannot be read whole from any attached store.")


class BadCopy(CopyView):
    project: str
    digest: str
    bytes: int
    lost: bool = Field(description="No attached store has a good copy of this chunk.")
    checkpoints: int = Field(description="That need it.")
