"""The commit protocol: begin, negotiate chunks, upload, seal each shard; the seal that completes the world commits.

`POST /v1/projects/{project}/runs/{run}/checkpoints`   BeginCheckpoint -> CheckpointBegun
`POST /v1/checkpoints/{id}/shards/{rank}/chunks`       NegotiateChunks -> ChunksNegotiated
`POST /v1/mount-proofs`                                                -> MountProofOffer
`PUT  /v1/checkpoints/{id}/shards/{rank}`              SealShard | FailShard -> CheckpointView
`PUT  /v1/checkpoints/{id}/shards`                     SealShards      -> CheckpointView
`POST /v1/checkpoints/{id}/abort`                      AbortCheckpoint -> CheckpointView
`GET  /v1/checkpoints/{id}?wait=30`                                    -> CheckpointView
`GET  /v1/projects/{project}/runs/{run}/checkpoints`   filters         -> Page[CheckpointView]
`GET  /v1/projects/{project}/checkpoints`, `/v1/checkpoints`  filters  -> Page[CheckpointView]
`GET  /v1/checkpoints/{id}/manifest`                                   -> Manifest
`GET  /v1/checkpoints/{id}/shards/{rank}`                              -> ShardChunks
`PATCH /v1/checkpoints/{id}`  (If-Match)               EditCheckpoint  -> CheckpointView

Negotiating gives an upload ticket for each absent chunk (rule verify-while-uploading). The same call reports finished
uploads, so that the service verifies them with the store during the rest of the upload. A client never names a bucket,
a key or a path.

The ranks of one host may begin and seal in one call together: a begin has an offer for each of them, and SealShards a
seal. If the call is refused for one of them, nothing is done for any, and each rank calls alone to hear why.
"""

from __future__ import annotations

import math
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    model_validator,
)

from holdfast_protocol.base import LARGEST_INTEGER, Digest, Fence, Label, Reply, Request, example, fits, since
from holdfast_protocol.codecs import Codec
from holdfast_protocol.states import AbortCause, CheckpointKind, CheckpointState, Health, ShardState, Tier

MAX_BATCH = 1000
"""Chunks of one call, of all its ranks together."""
MAX_RANKS = 64
"""Ranks of one host that begin or seal in one call."""
MAX_CHUNK_BYTES = 5 * 1024**3
"""The largest object that one PUT can carry on S3. The SDK cuts far below it."""


class ChunkOffer(Request):
    digest: Digest = Field(description="SHA-256 of the raw bytes.")
    bytes: int = Field(ge=0, le=MAX_CHUNK_BYTES)
    codec: Codec = Codec.RAW
    stored_digest: Digest | None = Field(default=None, description="SHA-256 of the bytes on the wire, if encoded.")
    stored_bytes: int | None = Field(default=None, ge=0, le=MAX_CHUNK_BYTES, description="Fewer than the chunk has.")
    md5: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        default=None, description="MD5 of the bytes on the wire; only if the server's capabilities ask for it."
    )
    ask: bool = Field(
        default=False,
        description="Only a question: `present` reserves the chunk as usual; else the answer is `absent`, and reserves "
        "nothing. For a client that would encode the chunk before it offers it.",
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
    """`path` is null unless the primary store is a mounted filesystem."""

    proof_id: str | None
    path: str | None
    expires_in_seconds: int
    unavailable: bool = Field(default=False, description="The primary store does not answer; ask again (since 1.2).")
    others: list[MountProofOffer] = Field(default_factory=list, description="For further stores, for reading.")


class NegotiateChunks(Fence):
    model_config = example(
        {
            "epoch": 1,
            "attempt": 3,
            "chunks": [
                {
                    "digest": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
                    "bytes": 67108864,
                }
            ],
            "finished": ["1bc04b5291c26a46d918139138b992d2de976d6851d0893b0476b85bfbdfc6e6"],
        }
    )

    largest_body_bytes: ClassVar[int] = 1024**2  # twice what MAX_BATCH of each take

    chunks: list[ChunkOffer] = Field(default_factory=list, max_length=MAX_BATCH)
    finished: list[Digest] = Field(default_factory=list, max_length=MAX_BATCH, description="Finished uploads.")
    mount_proof: MountProof | None = None


class StoreAnswer(StrEnum):
    """The meaning of a store's refusal for the client."""

    STORED = "stored"
    """The object is there already: an earlier try has arrived."""
    MISMATCH = "mismatch"
    """Other bytes arrived than were announced."""
    MISSING = "missing"
    LATER = "later"
    FULL = "full"
    EXPIRED = "expired"
    """This ticket is not accepted any more: ask for another one."""


class UploadTicket(Reply):
    """How to send one chunk. `http`: send the body with exactly these headers to `url` (relative: to the service).
    `file`: write `path`, fsync it, then report it in `finished`."""

    kind: Literal["http", "file"]
    method: str = "PUT"
    url: str = ""
    headers: dict[str, str] = Field(default_factory=dict)
    path: str = ""
    expires_in_seconds: int
    answers: dict[str, StoreAnswer] = Field(
        default_factory=dict, description="The meaning of this store's own error codes, beside those of S3."
    )


class ChunkAnswer(Reply):
    digest: str
    status: Literal["present", "upload", "absent"] = Field(description="`absent` only if the offer was a question.")
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


Step = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
MAX_CHUNKS_PER_SHARD = 200_000
LARGEST_SHARD_BYTES = 2**46
"""For one rank: both databases can still keep the sum over the largest world."""


def nonfinite_name(number: float) -> Literal["nan", "inf", "-inf"] | None:
    """None of a finite number."""
    if math.isfinite(number):
        return None
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


class MetricValue(Request):
    """A metric that survives JSON and every database: a finite value, or the name of a non-finite one (rule
    finite-metrics)."""

    value: float | None = Field(default=None, allow_inf_nan=False)
    nonfinite: Literal["nan", "inf", "-inf"] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> MetricValue:
        if (self.value is None) == (self.nonfinite is None):
            raise ValueError("give either a finite value or nonfinite")
        return self

    @classmethod
    def of(cls, number: float) -> MetricValue:
        nonfinite = nonfinite_name(number)
        return cls(value=number) if nonfinite is None else cls(nonfinite=nonfinite)


Metrics = dict[Annotated[str, Field(min_length=1, max_length=100)], MetricValue]
MAX_METRICS = 1000
MAX_COMPONENTS = 2000


class FirstOffer(Request):
    """A rank's first negotiation, within a begin: the same as NegotiateChunks under the begin's fence."""

    rank: int = Field(ge=0, le=99_999)
    chunks: list[ChunkOffer] = Field(min_length=1, max_length=MAX_BATCH)
    mount_proof: MountProof | None = None


def _refuse_crowd(ranks: list[int], chunks: int) -> None:
    if len(set(ranks)) < len(ranks):
        raise ValueError("a rank stands in this call twice; name it once")
    if len(ranks) > 1 and chunks > MAX_BATCH:
        raise ValueError(f"these ranks have {chunks} chunks, and {MAX_BATCH} fit in one call; make several calls")


class BeginCheckpoint(Fence):
    """With `origin_attempt` it is a late save (rule late-save-adoption): the checkpoint belongs to the attempt that
    staged it, and the fence's attempt pushes it.
    """

    model_config = example({"epoch": 1, "attempt": 3, "step": 1200, "world_size": 8, "labels": ["milestone"]})

    largest_body_bytes: ClassVar[int] = NegotiateChunks.largest_body_bytes

    step: Step
    world_size: int = Field(ge=1, le=100_000)
    kind: CheckpointKind = CheckpointKind.PERIODIC
    labels: list[Label] = Field(default_factory=list, max_length=20)
    origin_attempt: int | None = Field(
        default=None, ge=1, description="The attempt that staged this save and kept it in its spool; null: not spooled."
    )
    save_number: int | None = Field(
        default=None,
        ge=1,
        le=LARGEST_INTEGER,
        json_schema_extra=since(11),
        description="Counts the saves of the attempt that stages them, alike on all ranks. Parts of two saves of one "
        "step never become one checkpoint. Null: not known.",
    )
    allow_detached: bool = Field(
        default=False,
        description="A late save that the run has gone on without is kept beside the lineage instead of refused "
        "(`detached_branch`). Only with origin_attempt.",
    )
    offers: list[FirstOffer] = Field(
        default_factory=list,
        max_length=MAX_RANKS,
        json_schema_extra=since(6),
        description="It negotiates these too, for one rank or for several of one host.",
    )

    @model_validator(mode="after")
    def _each_rank_offers_once(self) -> BeginCheckpoint:
        _refuse_crowd([offer.rank for offer in self.offers], sum(len(offer.chunks) for offer in self.offers))
        return self

    @model_validator(mode="after")
    def _only_late_saves_are_detached(self) -> BeginCheckpoint:
        if self.allow_detached and self.origin_attempt is None:
            raise ValueError("allow_detached goes with origin_attempt: only a late save can be detached")
        return self


class Component(Request):
    """A named part of the training state, on one rank."""

    kind: Literal["model", "optimizer", "lr_scheduler", "dataloader", "rng", "extra"]
    logical_bytes: int = Field(ge=0, le=LARGEST_SHARD_BYTES)


class IndexOrdinals(Request):
    """The index's positions in the shard's chunk list."""

    shard: int = Field(ge=0, description="Ordinal of this rank's index document.")
    layout: int | None = Field(default=None, ge=0, description="Ordinal of the global layout; rank 0 has it.")


class HealthVerdict(Request):
    """The result of the trainer's own check of its state and metrics."""

    healthy: bool
    reason: str = Field(default="", max_length=1000, description="For people, if it is not healthy.")


ComponentName = Annotated[str, Field(min_length=1, max_length=200)]


def _bytes_of_components(said: dict[str, Any]) -> int:
    return sum(component.logical_bytes for component in said.get("components", {}).values())


class ShardContent(BaseModel):
    """A rank's statements on its shard beside the chunk list; a repeated seal must repeat them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    components: Annotated[dict[ComponentName, Component], Field(max_length=MAX_COMPONENTS), fits(512 * 1024)] = Field(
        default_factory=dict
    )
    logical_bytes: int = Field(
        default_factory=_bytes_of_components,
        ge=0,
        le=LARGEST_SHARD_BYTES,
        description="The bytes of its components together; added up if it is absent.",
    )
    finite: bool = Field(default=True, description="False: this part has NaN or infinity; the checkpoint has diverged.")
    metrics: Annotated[Metrics, Field(max_length=MAX_METRICS), fits(256 * 1024)] | None = Field(
        default=None, description="Rank 0's only (rule metrics-from-rank-0)."
    )
    verdict: HealthVerdict | None = Field(
        default=None,
        json_schema_extra=since(3),
        description="Rank 0's covers the metrics too. Without it a metric that is not finite makes a diverged "
        "checkpoint.",
    )
    dropped_components: list[ComponentName] = Field(
        default_factory=list,
        max_length=100,
        json_schema_extra=since(3),
        description="Rank 0's only: components that the run had at first, left out on purpose.",
    )


class ShardSummary(ShardContent):
    """A rank's whole report on its shard beside the chunk list, made by the trainer. Spool record, seal, row, record
    and manifest have each of its fields under the same name: a new one is a line here and a column of the shard.

    The fields here are measured: a repeated seal may have other values.
    """

    blocked_seconds: float | None = Field(
        default=None,
        ge=0,
        le=LARGEST_INTEGER,
        json_schema_extra=since(3),
        description="How long this save blocked training, on this rank.",
    )

    upload_seconds: float | None = Field(
        default=None,
        ge=0,
        le=LARGEST_INTEGER,
        json_schema_extra=since(5),
        description="From this rank's begin until its last chunk was sent.",
    )

    @property
    def summary(self) -> ShardSummary:
        """Itself, without a subclass's fields."""
        return ShardSummary(**{name: getattr(self, name) for name in ShardSummary.model_fields})


_SEAL: dict[str, JsonValue] = {
    "epoch": 1,
    "attempt": 3,
    "components": {"model": {"kind": "model", "logical_bytes": 67108864}},
    "logical_bytes": 67108864,
    "digest": "41e3b00a180a19aac3069c911a47915e9015960557c79deaf2e704c4e42c97ee",
    "chunks": [
        "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",
        "1bc04b5291c26a46d918139138b992d2de976d6851d0893b0476b85bfbdfc6e6",
    ],
    "index": {"shard": 1},
}


class SealShard(ShardSummary, Fence):
    model_config = example({**_SEAL, "metrics": {"loss": {"value": 2.75}}})

    largest_body_bytes: ClassVar[int] = 16 * 1024**2  # MAX_CHUNKS_PER_SHARD digests are 13 MiB

    outcome: Literal["sealed"] = "sealed"
    digest: Digest = Field(description="shard_digest(chunks); the service computes it again.")
    chunks: list[Digest] = Field(min_length=1, max_length=MAX_CHUNKS_PER_SHARD)
    index: IndexOrdinals


class RankSeal(SealShard):
    model_config = example({**_SEAL, "rank": 5})

    rank: int = Field(ge=0, le=99_999)


class SealShards(Request):
    """The seals of several ranks of one host, under one fence: all are sealed, or none."""

    model_config = example({"seals": [{**_SEAL, "rank": 5}]})

    largest_body_bytes: ClassVar[int] = NegotiateChunks.largest_body_bytes

    seals: list[RankSeal] = Field(min_length=1, max_length=MAX_RANKS)

    @model_validator(mode="after")
    def _under_one_fence(self) -> SealShards:
        _refuse_crowd([seal.rank for seal in self.seals], sum(len(seal.chunks) for seal in self.seals))
        if len({(seal.epoch, seal.attempt, seal.launch_id) for seal in self.seals}) > 1:
            raise ValueError("the seals are of different attempts; seal those of one attempt together")
        return self


class FailShard(Fence):
    model_config = example({"epoch": 1, "attempt": 3, "reason": "rank 5: the disk is full"})

    outcome: Literal["failed"] = "failed"
    reason: str = Field(min_length=1, max_length=4000)


def _outcome(body: Any) -> str:
    """OpenAPI has a default for either; a body without `outcome` is told by its reason."""
    if isinstance(body, dict):
        return str(body.get("outcome", "failed" if "reason" in body else "sealed"))
    return str(getattr(body, "outcome", "sealed"))


SealOrFail = Annotated[
    Annotated[SealShard, Tag("sealed")] | Annotated[FailShard, Tag("failed")], Discriminator(_outcome)
]


class AbortCheckpoint(Fence):
    model_config = example({"epoch": 1, "attempt": 3, "reason": "preempted"})

    reason: str = Field(min_length=1, max_length=4000)


class ForkedFrom(Reply):
    """The checkpoint that a run begins with, in the run that it was taken from (docs/adr/0085). These are words and no
    reference: they stay when that run is deleted."""

    project: str
    run: str
    checkpoint_id: str
    attempt: int
    step: int
    saved_in: str = Field(
        description="The run whose ranks saved it, by which its index documents name the save: `run` itself, or, if "
        "that one was forked from a fork, the first of them."
    )

    def __str__(self) -> str:
        return f"{self.project}/{self.run}@{self.step}#{self.attempt}"


class CheckpointView(Reply):
    id: str
    project: str
    run: str
    attempt: int
    step: int
    kind: CheckpointKind
    world_size: int
    state: CheckpointState
    health: Health
    health_reason: str | None
    tier: Tier
    digest: str | None
    logical_bytes: int = Field(description="The state's bytes in the trainer.")
    chunk_bytes: int = Field(description="Bytes of the distinct chunks that this checkpoint needs.")
    stored_bytes: int | None = Field(
        default=None,
        description="The bytes of these chunks in the store: fewer if they are compressed. Only set if one "
        "checkpoint is selected.",
    )
    uploaded_bytes: int = Field(description="Bytes that this checkpoint had to send, as they are stored.")
    deduplicated_bytes: int = Field(default=0, description="Bytes that it did not send, because the store had them.")
    metrics: Metrics
    labels: list[str]
    components: dict[str, Component]
    missing_components: list[str] = Field(
        default_factory=list,
        description="Components of the run's first checkpoint that this one lacks without a declared drop.",
    )
    created_at: datetime
    committed_at: datetime | None
    aborted_at: datetime | None
    abort_reason: str | None
    abort_rank: int | None
    abort_cause: AbortCause | None = Field(
        default=None, description="The kind of the reason, for programs: after `silent` a rank begins the step again."
    )
    pushed_by: int | None = Field(
        default=None, description="The attempt that pushed this save late, from a spool; null: it was saved in time."
    )
    blocked_seconds: float | None = Field(
        default=None, description="How long it blocked training, on its slowest rank; null: unknown."
    )
    detached: bool = Field(
        default=False, description="Pushed when the run had gone on without it: restored by name, never as latest."
    )
    unproven: bool | None = Field(
        default=None,
        description="One of its chunks has no good copy that the store or the service has hashed: the service must "
        "still read it. Only set in lists and if one checkpoint is selected.",
    )
    pinned_at: datetime | None = Field(
        default=None, description="Since when it is safe from policies and prune. Null: it is not, or no longer."
    )
    pinned_by: str | None = None
    pin_reason: str | None = None
    pinned_until: datetime | None = Field(default=None, description="Null, while pinned: until it is unpinned.")
    trashed_at: datetime | None = Field(default=None, description="In the trash since then.")
    trashed_by: str | None = Field(default=None, description="policy, person, or run: with its whole run.")
    trash_reason: str | None = None
    purge_at: datetime | None = Field(
        default=None,
        description="Until when it can be taken back from the trash. What a policy expired goes before that while a "
        "disk or the quota is short.",
    )
    deleted_at: datetime | None = None
    forked_from: ForkedFrom | None = Field(
        default=None, description="It was made by a fork, of this one; null: the run's own ranks saved it (since 1.10)."
    )
    sealed_ranks: int
    missing_ranks: list[int] = Field(description="The first 20 of ranks 0 to 99 that have not sealed.")
    etag: str


class RankNegotiated(ChunksNegotiated):
    rank: int


class CheckpointBegun(CheckpointView):
    """`negotiated` answers BeginCheckpoint.offers. Empty: nothing was offered, the checkpoint is not uploading any
    more, or the negotiation of a rank failed: then each negotiates in a call of its own, which says why."""

    negotiated: list[RankNegotiated] = Field(default_factory=list)


class EditCheckpoint(Request):
    sends_defaults = False
    model_config = example({"labels": ["milestone"], "health": "quarantined", "health_reason": "loss spike at 1180"})

    labels: list[Label] | None = Field(default=None, max_length=20)
    health: Literal[Health.OK, Health.DIVERGED, Health.QUARANTINED] | None = None
    health_reason: str | None = Field(default=None, max_length=1000)
    metrics: dict[Annotated[str, Field(min_length=1, max_length=100)], MetricValue | None] | None = Field(
        default=None,
        max_length=100,
        description="What was measured after the save, beside the metrics that it has. null takes one away.",
    )


class ShardView(ShardSummary, Reply):
    """The rank's report, complete since 1.5, and the service's own knowledge."""

    rank: int
    state: ShardState
    digest: str | None
    chunk_count: int
    index_digest: str | None = Field(description="The chunk that holds this rank's index document.")


class Manifest(Reply):
    """The content of a checkpoint. The chunks of each shard are read shard by shard (ShardChunks)."""

    checkpoint: CheckpointView
    layout_digest: str = Field(description="The chunk that holds the global layout.")
    shards: list[ShardView]


class ChunkRef(Reply):
    digest: str
    bytes: int


class ShardChunks(Reply):
    rank: int
    digest: str
    chunks: list[ChunkRef] = Field(description="In ordinal order.")
