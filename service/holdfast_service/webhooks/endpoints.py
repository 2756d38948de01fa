"""Routes of webhooks, for the administrators of a project."""

from __future__ import annotations

from fastapi import APIRouter

from holdfast_protocol.base import Page
from holdfast_protocol.webhooks import CreateWebhook, DeliveryView, WebhookCreated, WebhookView
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, page_of
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Admin, Cursor, IdempotencyKey, Limit
from holdfast_service.webhooks.manage import (
    create_webhook,
    delete_webhook,
    list_deliveries,
    list_webhooks,
    redeliver,
    show_delivery,
    show_webhook,
    try_out,
)

router = APIRouter(route_class=GuardedRoute, prefix="/v1", tags=["webhooks"])


@router.post("/projects/{project}/webhooks", status_code=201, summary="Make a webhook; its secret is shown once")
def create(
    project: str, body: CreateWebhook, context: Context, caller: Admin, idempotency_key: IdempotencyKey = None
) -> WebhookCreated:
    return create_webhook(context, caller, project, body, idempotency_key)


@router.get("/projects/{project}/webhooks", name="list", summary="List a project's webhooks")
def list_(
    project: str, context: Context, caller: Admin, cursor: Cursor = None, limit: Limit = DEFAULT_PAGE
) -> Page[WebhookView]:
    found = list_webhooks(context, caller, project)
    key = lambda each: f"{each.created_at.isoformat()} {each.id}"  # noqa: E731
    return page_of("webhooks", found, key, cursor=cursor, limit=limit)


@router.get("/webhooks/{webhook_id}", summary="Show a webhook, and how many of its calls wait")
def show(webhook_id: str, context: Context, caller: Admin) -> WebhookView:
    return show_webhook(context, caller, webhook_id)


@router.delete("/webhooks/{webhook_id}", summary="Delete a webhook; nothing is called any more")
def delete(webhook_id: str, context: Context, caller: Admin) -> WebhookView:
    return delete_webhook(context, caller, webhook_id)


@router.post("/webhooks/{webhook_id}/test", status_code=202, summary="Have a call made, to see whether it arrives")
def test(webhook_id: str, context: Context, caller: Admin) -> DeliveryView:
    return try_out(context, caller, webhook_id)


@router.get(
    "/webhooks/{webhook_id}/deliveries",
    name="list_deliveries",
    summary="What became of a webhook's calls, the newest first",
)
def deliveries(
    *,
    webhook_id: str,
    context: Context,
    caller: Admin,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[DeliveryView]:
    return list_deliveries(context, caller, webhook_id, cursor=cursor, limit=limit)


@router.get("/webhooks/{webhook_id}/deliveries/{delivery_id}", name="show_delivery", summary="What became of one call")
def delivery(webhook_id: str, delivery_id: str, context: Context, caller: Admin) -> DeliveryView:
    return show_delivery(context, caller, webhook_id, delivery_id)


@router.post(
    "/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver",
    status_code=202,
    name="redeliver",
    summary="Have a call made again, whether it has arrived or was given up",
)
def make_again(
    webhook_id: str, delivery_id: str, context: Context, caller: Admin, idempotency_key: IdempotencyKey = None
) -> DeliveryView:
    return redeliver(context, caller, webhook_id, delivery_id, idempotency_key)
