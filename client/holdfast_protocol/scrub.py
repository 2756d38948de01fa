"""Scrubbing on demand, and what a bad chunk means: which checkpoints and runs it concerns, and the nearest good steps.

`POST /v1/projects/{project}/runs/{run}/scrub`   StartScrub -> OperationView, whose result is a ScrubResult
`POST /v1/checkpoints/{id}/scrub`                StartScrub -> OperationView, whose result is a ScrubResult
`GET  /v1/chunks/{digest}/impact`                           -> Impact, over the projects that the token sees
`GET  /v1/checkpoints/{id}/impact`                          -> Impact of its bad chunks
`GET  /v1/projects/{project}/bad-copies`                    -> Page[BadCopy]
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from holdfast_protocol.base import Reply, Request
from holdfast_protocol.states import CheckpointState, CopyState, Health, Proof, StoreRole


class ScrubMode(StrEnum):
    READ = "read"
    """Every byte is read and hashed."""
    METADATA = "metadata"
    """Only sizes and checksums that the store reports: cheap, and blind to rot that the store does not see."""


class StartScrub(Request):
    mode: ScrubMode = ScrubMode.READ


class ScrubResult(Reply):
    """Copies, but for `lost`, which counts chunks, and `marked`, which names checkpoints."""

    mode: ScrubMode
    copies: int = Field(description="In all attached stores, of the chunks that were asked about.")
    good: int
    bad: int = Field(description="They have other bytes, another size, or cannot be decoded.")
    missing: int
    read_bytes: int
    healed: int = Field(description="Bad or missing before or now, and their store has another copy that was read.")
    lost: int = Field(description="Chunks of which no attached store has a good copy.")
    cold: int = Field(description="Cannot be read before a thaw, so they were left out.")
    unread: int = Field(description="Their store did not answer, or somebody else was at work on them.")
    problems: dict[str, str] = Field(description="By the store's role, why it could not be read or healed.")
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
    healed_at: datetime | None = Field(description="Since when its store has another copy that was read.")


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
