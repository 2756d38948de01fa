"""Webhooks: a project's URLs that are called on events of its runs, and the result of each call.

`POST   /v1/projects/{project}/webhooks`                    CreateWebhook -> WebhookCreated
`GET    /v1/projects/{project}/webhooks`                                  -> Page[WebhookView]
`GET    /v1/webhooks/{id}`                                                -> WebhookView
`DELETE /v1/webhooks/{id}`                                                -> WebhookView
`POST   /v1/webhooks/{id}/test`                                           -> DeliveryView
`GET    /v1/webhooks/{id}/deliveries`                                     -> Page[DeliveryView]

A call is a POST by the Standard Webhooks specification (1.0.0): `webhook-id` is the same in each retry,
`webhook-timestamp`, and `webhook-signature`: `v1,` and the Base64 of HMAC-SHA256 over `id.timestamp.body`, by the
secret that was shown once. The body is a WebhookBody. Answer 2xx once it is kept; 410 ends this call.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from holdfast_protocol.base import Reply, Request, example


class WebhookEvent(StrEnum):
    ATTEMPT_FAILED = "attempt.failed"
    """A rank has raised."""
    ATTEMPT_LOST = "attempt.lost"
    ATTEMPT_PREEMPTED = "attempt.preempted"
    ATTEMPT_FINISHED = "attempt.finished"
    RUN_STALLED = "run.stalled"
    RUN_GOES_ON = "run.goes_on"
    """It was stalled, and makes progress again."""
    CHECKPOINT_QUARANTINED = "checkpoint.quarantined"
    CHECKPOINT_DIVERGED = "checkpoint.diverged"
    CHECKPOINT_CORRUPT = "checkpoint.corrupt"
    TEST = "webhook.test"
    """Only on request."""


class CreateWebhook(Request):
    model_config = example({"url": "https://alerts.example/holdfast", "events": ["attempt.lost", "run.stalled"]})

    url: Annotated[str, StringConstraints(min_length=8, max_length=2000)] = Field(
        description="https; http and addresses that are not public only for hosts of HOLDFAST_WEBHOOK_ALLOWED_HOSTS."
    )
    events: list[WebhookEvent] = Field(min_length=1, max_length=len(WebhookEvent))


class WebhookView(Reply):
    id: str
    project: str
    url: str = Field(description="Without its query.")
    events: list[WebhookEvent]
    created_at: datetime
    created_by: str
    deleted_at: datetime | None
    waiting: int = Field(description="Calls that wait for a first or further try.")
    given_up: int = Field(description="Calls whose tries all failed.")


class WebhookCreated(WebhookView):
    secret: str = Field(description="`whsec_…`: signs each call. Shown once.")


class DeliveryView(Reply):
    id: str = Field(description="The call's `webhook-id`: the same in each retry.")
    event: WebhookEvent
    created_at: datetime
    tries: int
    next_try_at: datetime | None = Field(description="Null once the call is over.")
    delivered_at: datetime | None
    given_up_at: datetime | None
    last_status: int | None = Field(description="The receiver's last HTTP status.")
    last_error: str | None


class WebhookData(Reply):
    """The subject of the event; fields that do not apply are null."""

    project: str
    run: str | None = None
    attempt: int | None = None
    step: int | None = None
    checkpoint_id: str | None = None
    reason: str | None = None


class WebhookBody(Reply):
    type: WebhookEvent
    timestamp: datetime = Field(description="When it happened.")
    data: WebhookData
