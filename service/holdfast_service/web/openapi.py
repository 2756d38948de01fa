"""The OpenAPI document: examples go in, and errors that are never sent go out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from holdfast_protocol.attempts import EndAttempt, Heartbeat, OpenAttempt, ResumedFrom
from holdfast_protocol.checkpoints import (
    AbortCheckpoint,
    BeginCheckpoint,
    ChunkOffer,
    Component,
    EditCheckpoint,
    FailShard,
    IndexOrdinals,
    MetricValue,
    NegotiateChunks,
    ReadChunks,
    ReportChunk,
    SealShard,
)
from holdfast_protocol.copies import ScrubMode, StartDrill, StartScrub
from holdfast_protocol.digests import chunk_digest, shard_digest
from holdfast_protocol.policies import PutPolicy
from holdfast_protocol.pruning import (
    ApplyRetention,
    DeleteAll,
    ExtendHold,
    PinCheckpoint,
    PlaceHold,
    PlanRetention,
    PruneCheckpoints,
    PruneFilter,
    ReleaseHold,
    UndeleteCheckpoint,
)
from holdfast_protocol.runs import EditProject
from holdfast_protocol.service import CreateToken, PauseController
from holdfast_protocol.states import AttemptOutcome, Doing, Health, Scope, StoreRole
from holdfast_protocol.stores import CheckCatalog, ClaimStore, ConfirmCommits, MakeSample, StartSweep
from holdfast_protocol.tiers import RequestThaw, ThawSpeed
from holdfast_protocol.usage import DEFAULT_PRICES, ForecastCost
from holdfast_protocol.webhooks import CreateWebhook, WebhookEvent

# An example for each request body, shown in OpenAPI. They are made of the models, so they cannot become invalid.

_WEIGHTS, _INDEX = chunk_digest(b"weights"), chunk_digest(b"index")
_CHECKPOINT_ID = "ck_5f0c7d9f1f4b4c0f9f0e0a3d0b8a6e21"

EXAMPLES: tuple[BaseModel, ...] = (
    MakeSample(digest=_WEIGHTS, bytes=65536),
    OpenAttempt(launch_id="slurm-81723", after=2, world_size=8, host="node-17", environment={"torch": "2.13.0"}),
    ResumedFrom(epoch=1, attempt=3, checkpoint_id=_CHECKPOINT_ID),
    Heartbeat(epoch=1, attempt=3, step=1234, first_step=1201, steps_run=34, steps_per_second=1.6, doing=Doing.TRAINING),
    EndAttempt(epoch=1, attempt=3, outcome=AttemptOutcome.FINISHED),
    BeginCheckpoint(epoch=1, attempt=3, step=1200, world_size=8, labels=["milestone"]),
    NegotiateChunks(epoch=1, attempt=3, chunks=[ChunkOffer(digest=_WEIGHTS, bytes=67108864)], finished=[_INDEX]),
    SealShard(
        epoch=1,
        attempt=3,
        digest=shard_digest([_WEIGHTS, _INDEX]),
        chunks=[_WEIGHTS, _INDEX],
        index=IndexOrdinals(shard=1),
        logical_bytes=67108864,
        components={"model": Component(kind="model", logical_bytes=67108864)},
        metrics={"loss": MetricValue.of(2.75)},
    ),
    FailShard(epoch=1, attempt=3, reason="rank 5: the disk is full"),
    AbortCheckpoint(epoch=1, attempt=3, reason="preempted"),
    EditCheckpoint(labels=["milestone"], health=Health.QUARANTINED, health_reason="loss spike at step 1180"),
    ReadChunks(digests=[_WEIGHTS]),
    ReportChunk(digest=_WEIGHTS, problem="mismatch", detail="read twice from node-17"),
    PutPolicy(document={"keep_last": 3, "keep_within": "6h", "keep_within_daily": "7d"}),
    PlaceHold(reason="evidence for the audit of 2026", retain_until=datetime(2033, 12, 31, tzinfo=UTC)),
    ExtendHold(retain_until=datetime(2036, 12, 31, tzinfo=UTC)),
    ReleaseHold(reason="the audit is closed"),
    PauseController(reason="the store is being moved"),
    CheckCatalog(store=StoreRole.SECOND, deep=True),
    ClaimStore(),
    ConfirmCommits(project="demo", run="gpt-2", reason="a new run"),
    StartScrub(mode=ScrubMode.METADATA),
    StartSweep(store=StoreRole.SECOND, dry_run=True),
    StartDrill(selector="latest", store=StoreRole.SECOND),
    PlanRetention(policy={"keep_last": 3}, show="expire"),
    ApplyRetention(policy_digest="4f1d0c9a2b7e6835", checkpoint_ids=[_CHECKPOINT_ID]),
    PruneCheckpoints(filter=PruneFilter(before_step=5000, health=[Health.DIVERGED]), reason="loss spikes"),
    UndeleteCheckpoint(pin=True),
    DeleteAll(reason="a failed idea"),
    PinCheckpoint(reason="figure 3 of the paper", expires_in_seconds=90 * 86400),
    RequestThaw(days=3, speed=ThawSpeed.BULK),
    EditProject(quota_bytes=10 * 1024**4),
    DEFAULT_PRICES,
    ForecastCost(retention={"keep_within": "6h", "keep_within_daily": "7d"}),
    CreateToken(name="demo trainers", project="demo", scopes=[Scope.TRAIN, Scope.READ]),
    CreateWebhook(url="https://alerts.example/holdfast", events=[WebhookEvent.ATTEMPT_LOST, WebhookEvent.RUN_STALLED]),
)


# Finishes the OpenAPI document that FastAPI makes: examples go in, and errors that are never sent go out.

# FastAPI's own form of a 422; web/problem_reply.py answers with a Problem instead, which 4XX stands for.
_NEVER_SENT = ("HTTPValidationError", "ValidationError")


def finished(schema: dict[str, Any]) -> dict[str, Any]:
    """The same document, changed in place; twice is fine."""
    models = schema.get("components", {}).get("schemas", {})
    for example in EXAMPLES:
        model = models.get(type(example).__name__)
        if model is not None:
            model["examples"] = [example.model_dump(mode="json", exclude_defaults=True)]
    for name in _NEVER_SENT:
        models.pop(name, None)
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    return schema
