"""Webhooks of a project. See holdfast_protocol.webhooks."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast_client.operations.base import Operations
from holdfast_client.operations.pages import all_items
from holdfast_client.transport import path
from holdfast_protocol.base import Page
from holdfast_protocol.webhooks import CreateWebhook, DeliveryView, WebhookCreated, WebhookView


class WebhookOperations(Operations):
    def create_webhook(self, project: str, request: CreateWebhook) -> WebhookCreated:
        """Makes a webhook. Not tried again after a lost reply: the secret is told once."""
        route = path("projects", project, "webhooks")
        return self.transport.call("POST", route, WebhookCreated, body=request, retry_seconds=0)

    def webhooks(self, project: str) -> Page[WebhookView]:
        return self.transport.call("GET", path("projects", project, "webhooks"), Page[WebhookView])

    def delete_webhook(self, project: str, webhook: str) -> WebhookView:
        return self.transport.call("DELETE", path("projects", project, "webhooks", webhook), WebhookView)

    def test_webhook(self, project: str, webhook: str) -> DeliveryView:
        """Has a call made soon; `webhook_deliveries` tells what became of it."""
        return self.transport.call("POST", path("projects", project, "webhooks", webhook, "test"), DeliveryView)

    def webhook_deliveries(
        self, project: str, webhook: str, *, cursor: str | None = None, limit: int | None = None
    ) -> Page[DeliveryView]:
        """One page of a webhook's calls, the newest first."""
        route = path("projects", project, "webhooks", webhook, "deliveries")
        return self.transport.call("GET", route, Page[DeliveryView], params={"cursor": cursor, "limit": limit})

    def all_webhook_deliveries(self, project: str, webhook: str) -> Iterator[DeliveryView]:
        return all_items(lambda cursor: self.webhook_deliveries(project, webhook, cursor=cursor))
