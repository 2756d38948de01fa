"""Routes of webhooks, for the administrators of a project."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import Page
from holdfast_protocol.states import Scope
from holdfast_protocol.webhooks import CreateWebhook, DeliveryView, WebhookCreated, WebhookView
from holdfast_service.auth.authenticate import require
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE, MAX_PAGE
from holdfast_service.web.guarded_route import GuardedRoute
from holdfast_service.webhooks.manage import create_webhook, delete_webhook, list_deliveries, list_webhooks, try_out

router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects/{project}/webhooks", tags=["webhooks"])

Admin = Annotated[Principal, require(Scope.ADMIN)]


@router.post("", summary="Make a webhook; its secret is shown once")
def create(project: str, body: CreateWebhook, context: Context, caller: Admin) -> WebhookCreated:
    return create_webhook(context, caller, project, body)


@router.get("", summary="List a project's webhooks")
def list_(project: str, context: Context, caller: Admin) -> Page[WebhookView]:
    return list_webhooks(context, caller, project)


@router.delete("/{webhook}", summary="Delete a webhook; nothing is called any more")
def delete(project: str, webhook: str, context: Context, caller: Admin) -> WebhookView:
    return delete_webhook(context, caller, project, webhook)


@router.post("/{webhook}/test", summary="Have a call made, to see whether it arrives")
def test(project: str, webhook: str, context: Context, caller: Admin) -> DeliveryView:
    return try_out(context, caller, project, webhook)


@router.get("/{webhook}/deliveries", summary="What became of a webhook's calls, the newest first")
def deliveries(
    *,
    project: str,
    webhook: str,
    context: Context,
    caller: Admin,
    cursor: Annotated[str | None, Query(max_length=500)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
) -> Page[DeliveryView]:
    return list_deliveries(context, caller, project, webhook, cursor=cursor, limit=limit)
