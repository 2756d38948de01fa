"""Deletes a webhook: nothing is called any more, and its secret goes. What was called stays to be seen for a while."""

from __future__ import annotations

from holdfast_protocol.webhooks import WebhookView
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.resolve import project_named
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.webhooks.views import host_of, webhook_of, webhook_views


def delete_webhook(context: ServiceContext, caller: Principal, project_name: str, webhook_id: str) -> WebhookView:
    """Twice is fine. Raises `webhook_not_found`, also when it was forgotten with its last call (`forget.py`)."""
    with context.database.transaction() as session:
        project = project_named(session, caller, project_name)
        hook = webhook_of(session, project, webhook_id)
        if hook.deleted_at is None:
            hook.deleted_at = database_now(session)
            hook.secret = b""
            record_event(
                session,
                Actor.person(caller),
                "webhook.delete",
                project_id=project.id,
                before={"webhook": hook.id, "host": host_of(hook.url), "events": hook.events},
            )
            session.flush()
        return webhook_views(session, project, [hook])[0]
