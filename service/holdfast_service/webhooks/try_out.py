"""A call that somebody asks for, to see whether it arrives. The controller makes it, as any other."""

from __future__ import annotations

import secrets

from sqlalchemy import select

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.webhooks import DeliveryView, WebhookBody, WebhookData, WebhookEvent
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.insert import insert_absent
from holdfast_service.catalog.resolve import project_named
from holdfast_service.catalog.webhook_outbox import delivery_row
from holdfast_service.catalog.webhook_tables import WebhookDelivery
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.webhooks.views import delivery_view, host_of, webhook_of


def try_out(context: ServiceContext, caller: Principal, project_name: str, webhook_id: str) -> DeliveryView:
    """Raises `webhook_not_found`, and `invalid_request` for one that was deleted."""
    with context.database.transaction() as session:
        project = project_named(session, caller, project_name)
        hook = webhook_of(session, project, webhook_id)
        if hook.deleted_at is not None:
            raise ProblemError(ProblemCode.INVALID_REQUEST, f"The webhook {webhook_id} was deleted. Make it anew.")
        body = WebhookBody(
            type=WebhookEvent.TEST,
            timestamp=database_now(session),
            data=WebhookData(project=project.name, reason=f"asked for by {caller.name}"),
        )
        subject = secrets.token_hex(8)
        insert_absent(session, WebhookDelivery, [delivery_row(hook.id, subject, body)])
        record_event(
            session,
            Actor.person(caller),
            "webhook.test",
            project_id=project.id,
            after={"webhook": hook.id, "host": host_of(hook.url)},
        )
        made = select(WebhookDelivery).where(WebhookDelivery.webhook_id == hook.id, WebhookDelivery.subject == subject)
        return delivery_view(session.execute(made).scalar_one())
