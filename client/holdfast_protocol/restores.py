"""The reads of a restore: the checkpoint to restore now, why newer ones are skipped, and tickets for its chunks.

`GET  /v1/projects/{project}/runs/{run}/restore-point?selector=latest&before_step=`  -> RestoreDecision
`POST /v1/checkpoints/{id}/reads`           ReadChunks   -> ChunkReads
`POST /v1/checkpoints/{id}/chunk-reports`   ReportChunk  -> ChunkVerdict
`DELETE /v1/read-leases/{lease_id}`
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import Field

from holdfast_protocol.base import Digest, Reply, Request, example, since
from holdfast_protocol.checkpoints import MAX_BATCH, MountProof, ShardChunks, StoreAnswer
from holdfast_protocol.codecs import Codec
from holdfast_protocol.states import StoreRole


class RestorePoint(Reply):
    checkpoint_id: str
    step: int
    attempt: int
    world_size: int
    digest: str
    logical_bytes: int
    committed_at: datetime


class SkippedReason(StrEnum):
    UPLOADING = "uploading"
    ABORTED = "aborted"
    DIVERGED = "diverged"
    CORRUPT = "corrupt"
    QUARANTINED = "quarantined"
    COLD = "cold"
    TRASHED = "trashed"
    DETACHED = "detached"
    UNAVAILABLE = "unavailable"
    """Not whole in the stores that answer now (since 1.2)."""


class Skipped(Reply):
    checkpoint_id: str
    step: int
    attempt: int
    reason: SkippedReason
    detail: str


def skipped_in_words(skipped: Iterable[Skipped]) -> str:
    """One line: `1500 (aborted: disk full), 1400 (corrupt: a hole)`; empty if nothing was skipped."""
    parts = []
    for each in skipped:
        why = each.detail.partition(": ")[2].rstrip(".")
        parts.append(f"{each.step} ({each.reason.value}{': ' if why else ''}{why})")
    return ", ".join(parts)


class RestoreDecision(Reply):
    restore_point: RestorePoint | None
    skipped: list[Skipped] = Field(description="Newer checkpoints that were skipped, and why.")
    ever_committed: bool = Field(description="False only if nothing was ever committed in this run.")
    note: str = Field(default="", description="A sentence for people, if a store does not answer.")
    saved_with: dict[str, str] | None = Field(
        default=None, description="The environment of the attempt that saved the restore point (since 1.7)."
    )

    def notes(self, which: str) -> list[str]:
        """What a person must hear who reads `which`: that it is an older checkpoint than the newest, and that a store
        does not answer. What is still uploaded is no reason for the first."""
        skipped = skipped_in_words(each for each in self.skipped if each.reason is not SkippedReason.UPLOADING)
        told = [f"{which}: {self.note}"] if self.note else []
        if skipped and self.restore_point is not None:
            told.insert(0, f"{which} is step {self.restore_point.step}. Passed over: {skipped}.")
        return told


class ReadChunks(Request):
    model_config = example({"digests": ["9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"]})

    largest_body_bytes: ClassVar[int] = 256 * 1024  # MAX_BATCH digests are 67 KiB

    digests: list[Digest] = Field(min_length=1, max_length=MAX_BATCH)
    lease_id: str | None = Field(default=None, description="Renews this lease; null opens one (rule read-lease).")
    mount_proof: MountProof | None = None
    other_mount_proofs: list[MountProof] = Field(
        default_factory=list,
        max_length=4,
        json_schema_extra=since(2),
        description="For the stores beside the primary.",
    )
    avoid_stores: list[StoreRole] = Field(
        default_factory=list,
        max_length=4,
        json_schema_extra=since(2),
        description="Stores that do not answer this reader: used only if no other has the chunk.",
    )
    shard: int | None = Field(
        default=None, ge=0, le=100_000, json_schema_extra=since(7), description="This rank's chunk list comes along."
    )


class ReadTicket(Reply):
    """`http`: GET `url` with these headers (relative: to the service). `file`: read `path`. `gone`: not readable."""

    digest: str
    bytes: int
    stored_bytes: int = Field(description="Bytes to read: the chunk's own if the codec is raw.")
    codec: Codec = Codec.RAW
    kind: Literal["http", "file", "gone"]
    url: str = ""
    headers: dict[str, str] = Field(default_factory=dict)
    path: str = ""
    expires_in_seconds: int
    answers: dict[str, StoreAnswer] = Field(
        default_factory=dict, description="The meaning of this store's own error codes, beside those of S3."
    )
    store: StoreRole = Field(default=StoreRole.PRIMARY, description="The store to read from.")
    elsewhere: bool = Field(default=False, description="Another store has it too: ask again with `avoid_stores`.")


class ChunkReads(Reply):
    lease_id: str
    lease_expires_in_seconds: int
    unprotected: str | None = Field(
        default=None,
        description="Why no lease keeps the checkpoint from being purged while it is read; null if one does.",
    )
    chunks: list[ReadTicket]
    shard: ShardChunks | None = Field(default=None, description="As asked for (since 1.7).")


class ReportChunk(Request):
    model_config = example(
        {
            "digest": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
            "problem": "mismatch",
            "detail": "read twice from node-17",
        }
    )

    digest: Digest
    problem: Literal["missing", "truncated", "mismatch"]
    detail: str = Field(default="", max_length=1000)


class ChunkVerdict(Reply):
    """The service's finding after it read the chunk itself; only that marks a checkpoint (rule report-is-suspicion)."""

    digest: str
    readable: bool = Field(description="True: a copy with the right bytes is there; try again.")
    detail: str
    corrupt_checkpoints: list[str] = Field(description="Ids of the checkpoints that were marked corrupt.")
