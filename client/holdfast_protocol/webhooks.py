"""Webhooks: a project's URLs that are called on events of its runs, and the result of each call.

`POST   /v1/projects/{project}/webhooks`                    CreateWebhook -> WebhookCreated
`GET    /v1/projects/{project}/webhooks`                                  -> Page[WebhookView]
`GET    /v1/webhooks/{id}`                                                -> WebhookView
`DELETE /v1/webhooks/{id}`                                                -> WebhookView
`POST   /v1/webhooks/{id}/test`                                           -> DeliveryView
`GET    /v1/webhooks/{id}/deliveries`                                     -> Page[DeliveryView]
`GET    /v1/webhooks/{id}/deliveries/{delivery_id}`                       -> DeliveryView
`POST   /v1/webhooks/{id}/deliveries/{delivery_id}/redeliver`             -> DeliveryView

A call is a POST by the Standard Webhooks specification (1.0.0): `webhook-id` is the same in each retry,
`webhook-timestamp`, and `webhook-signature`: `v1,` and the Base64 of HMAC-SHA256 over `id.timestamp.body`, by the
secret that was shown once. The body is an Event, or what the webhook's `format` makes of it. Answer 2xx once it is
kept; 410 ends this call. A call that is redelivered comes again with the same `webhook-id`.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from holdfast_protocol.base import Reply, Request, example
from holdfast_protocol.events import EventType


class WebhookFormat(StrEnum):
    """The form of a call's body."""

    STANDARD = "standard"
    """An Event."""
    SLACK = "slack"
    """A message, for an incoming webhook of Slack, and of what takes the same."""
    PAGERDUTY = "pagerduty"
    """An event of the Events API v2. `run.goes_on` resolves what `run.stalled` has triggered, `attempt.revived` what
    `attempt.lost` has, `store.available` what `store.unavailable` has, and
    `quota.relieved` what `quota.near` and `quota.reached` have."""
    ALERTMANAGER = "alertmanager"
    """An alert for `/api/v2/alerts` of Prometheus's Alertmanager. The same events end it."""


class CreateWebhook(Request):
    model_config = ConfigDict(
        **example({"url": "https://alerts.example/holdfast", "events": ["attempt.lost", "run.stalled"]}),
        hide_input_in_errors=True,
    )

    url: Annotated[str, StringConstraints(min_length=8, max_length=2000)] = Field(
        description="https; http and addresses that are not public only for hosts of HOLDFAST_WEBHOOK_ALLOWED_HOSTS."
    )
    events: list[EventType] = Field(
        min_length=1,
        max_length=len(EventType),
        description="For `pagerduty` and `alertmanager` the events that end an alert are added to those that open it.",
    )
    format: WebhookFormat = WebhookFormat.STANDARD
    routing_key: Annotated[str, StringConstraints(pattern="^[0-9A-Za-z]{8,64}$")] | None = Field(
        default=None,
        repr=False,
        description="PagerDuty's integration key. For the format `pagerduty`, and for no other.",
    )

    @model_validator(mode="after")
    def _only_pagerduty_has_a_routing_key(self) -> CreateWebhook:
        if (self.format is WebhookFormat.PAGERDUTY) != (self.routing_key is not None):
            raise ValueError("the format `pagerduty` needs a routing_key, and no other format has one")
        return self


class WebhookView(Reply):
    id: str
    project: str
    url: str = Field(description="Without its query, and of other formats than `standard` without its path.")
    events: list[EventType]
    format: WebhookFormat
    created_at: datetime
    created_by: str
    deleted_at: datetime | None
    waiting: int = Field(description="Calls that wait for a first or further try.")
    given_up: int = Field(
        description="Calls that are not made any more: their tries failed, or a later call has taken them back."
    )


class WebhookCreated(WebhookView):
    secret: str | None = Field(
        description="`whsec_…`: signs each call of the format `standard`. Shown once. Null for other formats."
    )


class DeliveryView(Reply):
    id: str = Field(description="The call's `webhook-id`: the same in each retry.")
    event: EventType
    created_at: datetime
    tries: int
    next_try_at: datetime | None = Field(description="Null once the call is over.")
    delivered_at: datetime | None
    given_up_at: datetime | None
    last_status: int | None = Field(description="The receiver's last HTTP status.")
    last_error: str | None
