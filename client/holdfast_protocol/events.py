"""Events: what happens to runs, checkpoints and stores. Webhooks are called on them; callers list and follow them.

`GET /v1/events`        ?project=&run=&type=&cursor=&limit= -> Page[EventView]   (the newest first)
`GET /v1/events/stream` ?project=&run=&type=&after=&seconds= -> server-sent events, as they happen

Each message of the stream has an EventView as its `data`, its type as `event` and its id as `id`. A message without
data says only how far the stream has come. A client that reconnects with the last id in `Last-Event-ID` misses no event
and gets none twice, whichever process of the service answers.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from holdfast_protocol.base import Reply
from holdfast_protocol.states import StoreRole

LAST_EVENT_ID_HEADER = "Last-Event-ID"
LONGEST_STREAM_SECONDS = 3600


class EventType(StrEnum):
    ATTEMPT_FAILED = "attempt.failed"
    """A rank has raised."""
    ATTEMPT_LOST = "attempt.lost"
    ATTEMPT_REVIVED = "attempt.revived"
    """It was called lost, and has called again."""
    ATTEMPT_PREEMPTED = "attempt.preempted"
    ATTEMPT_FINISHED = "attempt.finished"
    RUN_STALLED = "run.stalled"
    RUN_GOES_ON = "run.goes_on"
    """It was stalled, and makes progress again, or its attempt has ended."""
    RESTORE_STARTED = "restore.started"
    """An attempt was opened by a launch, and is told which checkpoint it is to load. The reason: what was skipped."""
    RESTORE_FINISHED = "restore.finished"
    """The ranks of an attempt have loaded a checkpoint."""
    CHECKPOINT_COMMITTED = "checkpoint.committed"
    CHECKPOINT_ABORTED = "checkpoint.aborted"
    CHECKPOINT_TRASHED = "checkpoint.trashed"
    """By a person or by a policy; it can be taken back."""
    CHECKPOINT_PURGED = "checkpoint.purged"
    """For good."""
    CHECKPOINT_QUARANTINED = "checkpoint.quarantined"
    CHECKPOINT_DIVERGED = "checkpoint.diverged"
    CHECKPOINT_CORRUPT = "checkpoint.corrupt"
    DRILL_SUCCEEDED = "drill.succeeded"
    DRILL_FAILED = "drill.failed"
    STORE_UNAVAILABLE = "store.unavailable"
    """A process of the service could not use a store for a while."""
    STORE_AVAILABLE = "store.available"
    """It was unavailable, and no process says so any more."""
    QUOTA_NEAR = "quota.near"
    """Four fifths of a project's quota are used."""
    QUOTA_REACHED = "quota.reached"
    """All of it is used, or it has refused a call."""
    QUOTA_RELIEVED = "quota.relieved"
    """It was near or reached, and less than three quarters are used, or it was changed."""
    TEST = "webhook.test"
    """Only on request, and for the webhook alone."""


class EventData(Reply):
    """The subject of the event; fields that do not apply are null."""

    project: str | None = Field(default=None, description="null: it concerns all of them.")
    run: str | None = None
    attempt: int | None = None
    step: int | None = None
    checkpoint_id: str | None = None
    operation: str | None = None
    store: StoreRole | None = None
    quota: str | None = Field(default=None, description="What it counts: `bytes`, or `soft bytes` of a soft one.")
    reason: str | None = None


class Event(Reply):
    type: EventType
    timestamp: datetime = Field(description="When it happened.")
    data: EventData


class EventView(Reply):
    id: str = Field(description="The position in the stream, for `Last-Event-ID`: the catalog's epoch and a number.")
    type: str = Field(description="An EventType, or one that a newer service knows.", examples=["checkpoint.committed"])
    timestamp: datetime = Field(description="When it happened.")
    data: EventData
