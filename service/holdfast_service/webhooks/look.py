"""The webhooks of a project, and what became of their calls. For its administrators: a URL may hold a secret."""

from __future__ import annotations

from sqlalchemy import select

from holdfast_protocol.base import Page
from holdfast_protocol.webhooks import DeliveryView, WebhookView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.cursors import cut_page, decode_cursor
from holdfast_service.catalog.resolve import project_named
from holdfast_service.catalog.webhook_tables import Webhook, WebhookDelivery
from holdfast_service.context import ServiceContext
from holdfast_service.webhooks.views import delivery_view, webhook_of, webhook_views

_CURSOR = "deliveries"


def list_webhooks(context: ServiceContext, caller: Principal, project_name: str) -> Page[WebhookView]:
    """All that are not deleted: there are few."""
    with context.database.read() as session:
        project = project_named(session, caller, project_name)
        hooks = session.scalars(
            select(Webhook)
            .where(Webhook.project_id == project.id, Webhook.deleted_at.is_(None))
            .order_by(Webhook.created_at, Webhook.id)
        ).all()
        return Page(items=webhook_views(session, project, hooks))


def list_deliveries(
    context: ServiceContext, caller: Principal, project_name: str, webhook_id: str, *, cursor: str | None, limit: int
) -> Page[DeliveryView]:
    """The newest first. Raises `webhook_not_found`."""
    with context.database.read() as session:
        project = project_named(session, caller, project_name)
        hook = webhook_of(session, project, webhook_id)
        query = select(WebhookDelivery).where(WebhookDelivery.webhook_id == hook.id)
        if cursor is not None:
            query = query.where(WebhookDelivery.id < decode_cursor(_CURSOR, cursor, int)[0])
        found = session.scalars(query.order_by(WebhookDelivery.id.desc()).limit(limit + 1)).all()
        rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (row.id,))
        return Page(items=[delivery_view(row) for row in rows], next_cursor=next_cursor)
