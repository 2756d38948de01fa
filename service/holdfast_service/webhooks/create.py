"""Makes a webhook. Its secret is shown once; it is kept as it is, for it signs each call."""

from __future__ import annotations

import secrets

from sqlalchemy import func, select

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.webhooks import CreateWebhook, WebhookCreated
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.audit import Actor, record_event
from holdfast_service.catalog.resolve import project_named
from holdfast_service.catalog.tables import Project
from holdfast_service.catalog.webhook_tables import Webhook
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.webhooks.signing import new_secret, shown
from holdfast_service.webhooks.target import RefusedTargetError, parsed
from holdfast_service.webhooks.views import host_of, webhook_views

MOST_OF_A_PROJECT = 20


def create_webhook(
    context: ServiceContext, caller: Principal, project_name: str, request: CreateWebhook
) -> WebhookCreated:
    """Its name is resolved when it is called, each time: only its form is judged here. Raises `invalid_request`."""
    try:
        parsed(request.url, context.settings.webhook_hosts)
    except RefusedTargetError as refused:
        raise ProblemError(ProblemCode.INVALID_REQUEST, str(refused)) from None
    secret = new_secret()
    with context.database.transaction() as session:
        project = project_named(session, caller, project_name)
        session.execute(select(Project.id).where(Project.id == project.id).with_for_update())
        there = session.execute(
            select(func.count()).where(Webhook.project_id == project.id, Webhook.deleted_at.is_(None))
        ).scalar_one()
        if there >= MOST_OF_A_PROJECT:
            raise ProblemError(
                ProblemCode.INVALID_REQUEST,
                f"The project {project_name!r} has {there} webhooks, and cannot have more. Delete one.",
            )
        hook = Webhook(
            id=f"wh_{secrets.token_hex(8)}",
            project_id=project.id,
            url=request.url,
            secret=secret,
            events=sorted({event.value for event in request.events}),
            created_at=database_now(session),
            created_by=caller.name,
        )
        session.add(hook)
        session.flush()
        record_event(
            session,
            Actor.person(caller),
            "webhook.create",
            project_id=project.id,
            after={"webhook": hook.id, "host": host_of(hook.url), "events": hook.events},
        )
        (view,) = webhook_views(session, project, [hook])
    return WebhookCreated(**view.model_dump(), secret=shown(secret))
