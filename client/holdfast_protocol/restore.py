"""The way back: which checkpoint can be restored now, why not a newer one, and tickets to read its chunks.

`GET  /v1/projects/{project}/runs/{run}/restore-point?selector=latest&before_step=`  -> RestoreDecision
`POST /v1/checkpoints/{id}/reads`           ReadChunks   -> ChunkReads
`POST /v1/checkpoints/{id}/chunk-reports`   ReportChunk  -> ChunkVerdict
`DELETE /v1/read-leases/{lease_id}`
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from holdfast_protocol.base import Digest, Reply, Request
from holdfast_protocol.chunks import MAX_BATCH, MountProof
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


class PassedOverReason(StrEnum):
    UPLOADING = "uploading"
    ABORTED = "aborted"
    DIVERGED = "diverged"
    CORRUPT = "corrupt"
    QUARANTINED = "quarantined"
    COLD = "cold"
    TRASHED = "trashed"
    OFF_LINE = "off_line"
    AWAY = "away"
    """Not whole in the stores that answer now (since 1.2)."""


class PassedOver(Reply):
    checkpoint_id: str
    step: int
    attempt: int
    reason: PassedOverReason
    detail: str


class RestoreDecision(Reply):
    restore_point: RestorePoint | None
    passed_over: list[PassedOver]
    ever_committed: bool
    note: str = Field(default="", description="A sentence for people, where a store does not answer.")


class ReadChunks(Request):
    largest_body_bytes: ClassVar[int] = 256 * 1024  # MAX_BATCH digests are 67 KiB

    digests: list[Digest] = Field(min_length=1, max_length=MAX_BATCH)
    lease_id: str | None = Field(default=None, description="Renews this lease; null opens one (protocol rule 21).")
    mount_proof: MountProof | None = None
    other_mount_proofs: list[MountProof] = Field(
        default_factory=list, max_length=4, description="Of the stores beside the primary (since 1.2)."
    )
    avoid_stores: list[StoreRole] = Field(
        default_factory=list,
        max_length=4,
        description="Stores that do not answer this reader: taken only where no other has the chunk (since 1.2).",
    )

    @model_serializer(mode="wrap")
    def _as_an_older_service_takes_it(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """It refuses fields that it does not know, and needs none that say nothing."""
        document: dict[str, Any] = write(self)
        return {name: value for name, value in document.items() if name not in _SINCE_MINOR_2 or value}


_SINCE_MINOR_2 = ("other_mount_proofs", "avoid_stores")


class ReadTicket(Reply):
    """`http`: GET `url` with these headers (relative: to the service). `file`: read `path`. `gone`: not readable."""

    digest: str
    bytes: int
    stored_bytes: int = Field(description="Of what is read: the chunk's own where the codec is raw.")
    codec: Codec = Codec.RAW
    kind: Literal["http", "file", "gone"]
    url: str = ""
    headers: dict[str, str] = Field(default_factory=dict)
    path: str = ""
    expires_in_seconds: int
    store: StoreRole = Field(default=StoreRole.PRIMARY, description="Where it is read from.")
    elsewhere: bool = Field(default=False, description="Another store has it too: ask again with `avoid_stores`.")


class ChunkReads(Reply):
    lease_id: str
    lease_expires_in_seconds: int
    unprotected: str | None = Field(
        default=None,
        description="Why no lease keeps the checkpoint from being purged while it is read; null where one does.",
    )
    chunks: list[ReadTicket]


class ReportChunk(Request):
    digest: Digest
    problem: Literal["missing", "truncated", "mismatch"]
    detail: str = Field(default="", max_length=1000)


class ChunkVerdict(Reply):
    """What the service found when it read the chunk itself; only that marks a checkpoint (protocol rule 22)."""

    digest: str
    readable: bool = Field(description="True: a copy with the right bytes is there; try again.")
    detail: str
    corrupt_checkpoints: list[str] = Field(description="Ids of the checkpoints that were marked corrupt.")
