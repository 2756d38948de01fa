"""Copies in a second store, scrubbing, and what a bad chunk means."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from holdfast_protocol.base import LARGEST_INTEGER, Label, Reply, Request, example
from holdfast_protocol.checkpoints import Skipped
from holdfast_protocol.retention import KeepBest
from holdfast_protocol.states import CheckpointKind, CheckpointState, CopyState, Health, Proof, StoreRole

# Copies in a second store: which checkpoints get one (a policy of kind `copies`), how far behind it is, and drills.
#
# `GET  /v1/projects/{project}/copies`              -> Page[RunCopies]
# `GET  /v1/projects/{project}/runs/{run}/copies`   -> RunCopies
# `POST /v1/projects/{project}/runs/{run}/drills`   StartDrill -> OperationView, whose result is a DrillResult


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

    model_config = example({"selector": "latest", "store": "second"})

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
    skipped: list[Skipped] = Field(description="Newer checkpoints, each with why it was not the one.")


# Scrubbing on demand, and what a bad chunk means: which checkpoints and runs it concerns, and the nearest good steps.
#
# `POST /v1/projects/{project}/runs/{run}/scrubs`  StartScrub -> OperationView, whose result is a ScrubResult
# `POST /v1/checkpoints/{id}/scrubs`               StartScrub -> OperationView, whose result is a ScrubResult
# `GET  /v1/chunks/{digest}/impact`                           -> Impact, over the projects that the token sees
# `GET  /v1/checkpoints/{id}/impact`                          -> Impact of its bad chunks
# `GET  /v1/projects/{project}/bad-copies`                    -> Page[BadCopy]


class ScrubMode(StrEnum):
    READ = "read"
    """Every byte is read and hashed."""
    METADATA = "metadata"
    """Only sizes and checksums that the store reports: cheap, and blind to rot that the store does not see."""


class StartScrub(Request):
    model_config = example({"mode": "metadata"})

    mode: ScrubMode = ScrubMode.READ


class ScrubResult(Reply):
    """Copies, but for `lost`, which counts chunks, and `marked`, which names checkpoints."""

    mode: ScrubMode
    copies: int = Field(description="In all attached stores, of the chunks that were asked about.")
    good: int
    bad: int = Field(description="They have other bytes, another size, or cannot be decoded.")
    missing: int
    read_bytes: int
    repaired: int = Field(description="Bad or missing before or now, and their store has another copy that was read.")
    lost: int = Field(description="Chunks of which no attached store has a good copy.")
    cold: int = Field(description="Cannot be read before a thaw, so they were left out.")
    unread: int = Field(description="Their store did not answer, or somebody else was at work on them.")
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
    finding: str | None = Field(description="What was found wrong with it.")
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
    good_before: GoodStep | None = Field(description="Before the first checkpoint that is concerned.")
    good_after: GoodStep | None = Field(description="After the last one.")


class Impact(Reply):
    chunks: list[ChunkImpact]
    runs: list[AffectedRun]
    checkpoints: list[AffectedCheckpoint] = Field(description="The newest steps first, run by run.")
    left_off: int = Field(description="Checkpoints that are concerned and not shown: there are too many.")
    lost: bool = Field(description="One of them cannot be read whole from any attached store.")


class BadCopy(CopyView):
    project: str
    digest: str
    bytes: int
    lost: bool = Field(description="No attached store has a good copy of this chunk.")
    checkpoints: int = Field(description="That need it.")
