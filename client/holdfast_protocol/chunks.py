"""Negotiating chunks: which are there already, and an upload ticket for each that is not (protocol rules 11 to 19).

`POST /v1/checkpoints/{id}/shards/{rank}/chunks`   NegotiateChunks -> ChunksNegotiated
`POST /v1/mount-proofs`                                            -> MountProofOffer

The same call reports the uploads that are done, so that the service verifies them with the store while the rest
is still going up. A client never names a bucket, a key or a path.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from holdfast_protocol.base import Digest, Reply, Request
from holdfast_protocol.codecs import Codec
from holdfast_protocol.fencing import Fence

MAX_BATCH = 1000
MAX_CHUNK_BYTES = 5 * 1024**3
"""The largest object that one PUT can carry on S3. The SDK cuts far below it."""


class ChunkOffer(Request):
    digest: Digest = Field(description="SHA-256 of the raw bytes.")
    bytes: int = Field(ge=0, le=MAX_CHUNK_BYTES)
    codec: Codec = Codec.RAW
    stored_digest: Digest | None = Field(default=None, description="SHA-256 of the bytes on the wire, if encoded.")
    stored_bytes: int | None = Field(default=None, ge=0, le=MAX_CHUNK_BYTES, description="Fewer than the chunk has.")
    md5: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        default=None, description="Of the bytes on the wire; only where the server's capabilities ask for it."
    )
    ask: bool = Field(
        default=False,
        description="Only asks: `present` comes with its reference as ever, else nothing is reserved and the answer is "
        "`absent`. For a client that would encode the chunk before it offers it.",
    )

    @property
    def wire_digest(self) -> str:
        return self.digest if self.stored_digest is None else self.stored_digest

    @property
    def wire_bytes(self) -> int:
        return self.bytes if self.stored_bytes is None else self.stored_bytes


class MountProof(Request):
    """Shows that this client sees the store's own filesystem: the content of a file that the service just wrote."""

    proof_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    content: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class MountProofOffer(Reply):
    """`path` is null where the primary store is not a mounted filesystem."""

    proof_id: str | None
    path: str | None
    expires_in_seconds: int
    away: bool = Field(default=False, description="The primary store does not answer; ask again (since 1.2).")
    others: list[MountProofOffer] = Field(default_factory=list, description="Of further stores, for reading.")


class NegotiateChunks(Fence):
    largest_body_bytes: ClassVar[int] = 1024**2  # twice what MAX_BATCH of each take

    chunks: list[ChunkOffer] = Field(default_factory=list, max_length=MAX_BATCH)
    finished: list[Digest] = Field(default_factory=list, max_length=MAX_BATCH, description="Uploads that are done.")
    mount_proof: MountProof | None = None


class UploadTicket(Reply):
    """How to send one chunk. `http`: send the body with exactly these headers to `url` (relative: to the service).
    `file`: write `path`, fsync it, then report it in `finished`."""

    kind: Literal["http", "file"]
    method: str = "PUT"
    url: str = ""
    headers: dict[str, str] = Field(default_factory=dict)
    path: str = ""
    expires_in_seconds: int


class ChunkAnswer(Reply):
    digest: str
    status: Literal["present", "upload", "absent"] = Field(description="`absent` only where the offer was to ask.")
    ticket: UploadTicket | None = None


class FinishedState(StrEnum):
    VERIFIED = "verified"
    MISSING = "missing"
    MISMATCH = "mismatch"


class FinishedAnswer(Reply):
    digest: str
    state: FinishedState
    detail: str = ""


class ChunksNegotiated(Reply):
    chunks: list[ChunkAnswer]
    finished: list[FinishedAnswer]
