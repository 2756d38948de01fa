"""Webhooks and their calls as people see them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.webhooks import DeliveryView, WebhookEvent, WebhookView
from holdfast_service.catalog.tables import Project
from holdfast_service.catalog.webhook_tables import TO_DELIVER, Webhook, WebhookDelivery
from holdfast_service.errors import ProblemError


def webhook_views(session: Session, project: Project, hooks: Sequence[Webhook]) -> list[WebhookView]:
    counted = {
        webhook_id: (waiting, given_up)
        for webhook_id, waiting, given_up in session.execute(
            select(
                WebhookDelivery.webhook_id,
                func.count().filter(text(TO_DELIVER)),
                func.count(WebhookDelivery.given_up_at),
            )
            .where(WebhookDelivery.webhook_id.in_([hook.id for hook in hooks]))
            .group_by(WebhookDelivery.webhook_id)
        )
    }
    return [
        WebhookView(
            id=hook.id,
            project=project.name,
            url=shown_url(hook.url),
            events=[WebhookEvent(event) for event in hook.events],
            created_at=hook.created_at,
            created_by=hook.created_by,
            deleted_at=hook.deleted_at,
            waiting=counted.get(hook.id, (0, 0))[0],
            given_up=counted.get(hook.id, (0, 0))[1],
        )
        for hook in hooks
    ]


def shown_url(url: str) -> str:
    """Without the query, where receivers often keep a secret."""
    head, mark, _ = url.partition("?")
    return head + (f"{mark}…" if mark else "")


def host_of(url: str) -> str:
    """For logs and events: some receivers keep their secret in the path."""
    return urlsplit(url).hostname or ""


def delivery_view(row: WebhookDelivery) -> DeliveryView:
    over = row.delivered_at is not None or row.given_up_at is not None
    return DeliveryView(
        id=delivery_id(row),
        event=WebhookEvent(row.event),
        created_at=row.created_at,
        tries=row.tries,
        next_try_at=None if over else row.next_try_at,
        delivered_at=row.delivered_at,
        given_up_at=row.given_up_at,
        last_status=row.last_status,
        last_error=row.last_error,
    )


def delivery_id(row: WebhookDelivery) -> str:
    return f"msg_{row.webhook_id.removeprefix('wh_')}_{row.id}"


def webhook_of(session: Session, project: Project, webhook_id: str) -> Webhook:
    """Raises `webhook_not_found`, also for another project's."""
    hook = session.scalar(select(Webhook).where(Webhook.id == webhook_id, Webhook.project_id == project.id))
    if hook is None:
        raise ProblemError(
            ProblemCode.WEBHOOK_NOT_FOUND,
            f"The project {project.name!r} has no webhook {webhook_id!r}. Correct the id; `holdfast webhook list` "
            "shows them.",
            webhook=webhook_id,
        )
    return hook
