"""Webhooks of a project: made, shown, tried out and deleted; calls that a person has made again."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.base import Page
from holdfast_protocol.events import Event, EventData, EventType
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.webhooks import CreateWebhook, DeliveryView, WebhookCreated, WebhookFormat, WebhookView
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.repeats import Repeatable, already_made, digest_of
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.webhooks import TO_DELIVER, Webhook, WebhookDelivery
from holdfast_service.errors import ProblemError
from holdfast_service.events.announce import delivery_row
from holdfast_service.runs.views import project_named, refuse_if_deleted
from holdfast_service.secrets.kept import HookSecrets, hook_secrets, keep_hook
from holdfast_service.secrets.keyring import DecryptionError, Keyring
from holdfast_service.webhooks.deliver import new_secret, shown
from holdfast_service.webhooks.formats import with_ends
from holdfast_service.webhooks.target import RefusedTargetError, parsed


def webhook_views(session: Session, keyring: Keyring, project: Project, hooks: Sequence[Webhook]) -> list[WebhookView]:
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
            url=shown_url(hook, _url_of(keyring, hook)),
            events=sorted(map(EventType, with_ends(hook.format, hook.events))),
            format=WebhookFormat(hook.format),
            created_at=hook.created_at,
            created_by=hook.created_by,
            deleted_at=hook.deleted_at,
            waiting=counted.get(hook.id, (0, 0))[0],
            given_up=counted.get(hook.id, (0, 0))[1],
        )
        for hook in hooks
    ]


def shown_url(hook: Webhook, url: str) -> str:
    """Without the query, where receivers often keep a secret; Slack and others keep it in the path."""
    if hook.format != WebhookFormat.STANDARD and url:
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/…"
    head, mark, _ = url.partition("?")
    return head + (f"{mark}…" if mark else "")


def _url_of(keyring: Keyring, hook: Webhook) -> str:
    """Raises `busy` in a process that lacks the key."""
    try:
        return hook_secrets(keyring, hook).url
    except DecryptionError as error:
        raise ProblemError(
            ProblemCode.BUSY,
            f"The webhook {hook.id} cannot be read: {error}. Give this service all keys of the catalog's others "
            "(HOLDFAST_SECRETS_KEY_FILE), and start it again.",
        ) from None


def host_of(url: str) -> str:
    """For logs and events: some receivers keep their secret in the path."""
    return urlsplit(url).hostname or ""


def delivery_view(row: WebhookDelivery) -> DeliveryView:
    over = row.delivered_at is not None or row.given_up_at is not None
    return DeliveryView(
        id=delivery_id(row),
        event=EventType(row.event),
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


def webhook_by_id(
    session: Session, caller: Principal, webhook_id: str, *, locked: bool = False
) -> tuple[Project, Webhook]:
    """Raises `webhook_not_found`, also for another project's."""
    query = select(Project, Webhook).join(Webhook, Webhook.project_id == Project.id).where(Webhook.id == webhook_id)
    found = session.execute(query.with_for_update(of=Webhook) if locked else query).one_or_none()
    if found is None or caller.project_id not in (None, found[0].id):
        raise ProblemError(
            ProblemCode.WEBHOOK_NOT_FOUND,
            f"There is no webhook {webhook_id!r}. Correct the id; `holdfast webhooks list` shows them.",
            webhook=webhook_id,
        )
    return found[0], found[1]


MOST_OF_A_PROJECT = 20


def create_webhook(
    context: ServiceContext, caller: Principal, project_name: str, request: CreateWebhook, key: str | None = None
) -> WebhookCreated:
    """Makes a webhook. Its secret is shown once; it is kept, for it signs each call of the standard format. Its
    name is resolved when it is called, each time: only its form is judged here. For a receiver that keeps alerts open
    the events that end them are added. `key`: the client's Idempotency-Key.
    Raises `invalid_request`, `already_made` and `idempotency_key_reused`."""
    try:
        parsed(request.url, context.settings.webhook_hosts)
    except RefusedTargetError as refused:
        raise ProblemError(ProblemCode.INVALID_REQUEST, str(refused)) from None
    secret = new_secret() if request.routing_key is None else request.routing_key.encode()
    repeat = Repeatable(caller.token_id, key, digest_of("webhook", project_name, request=request))
    with context.database.transaction() as session:
        project = project_named(session, caller, project_name)
        if (earlier := repeat.earlier(session)) is not None:
            raise already_made("webhook", earlier)
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
            events=sorted(with_ends(request.format, request.events)),
            format=request.format.value,
            created_at=database_now(session),
            created_by=caller.name,
        )
        keep_hook(context.keyring, hook, HookSecrets(request.url, secret))
        session.add(hook)
        session.flush()
        record_event(
            session,
            Actor.person(caller),
            "webhook.create",
            project_id=project.id,
            after={"webhook": hook.id, "host": host_of(request.url), "events": hook.events, "format": hook.format},
        )
        repeat.made(session, hook.id)
        (view,) = webhook_views(session, context.keyring, project, [hook])
    signs = request.format is WebhookFormat.STANDARD
    return WebhookCreated(**view.model_dump(), secret=shown(secret) if signs else None)


def delete_webhook(context: ServiceContext, caller: Principal, webhook_id: str) -> WebhookView:
    """Deletes a webhook: nothing is called any more. Its secret goes, and what of its URL may hold one. What was called
    stays to be seen for a while.
    Twice is fine. Raises `webhook_not_found`, also when it was forgotten with its last call (`controller.py`)."""
    with context.database.transaction() as session:
        # Locked: its secrets may be being encrypted with another key.
        project, hook = webhook_by_id(session, caller, webhook_id, locked=True)
        if hook.deleted_at is None:
            hook.deleted_at = database_now(session)
            url = _url_of(context.keyring, hook)
            keep_hook(context.keyring, hook, HookSecrets(shown_url(hook, url), b""))
            record_event(
                session,
                Actor.person(caller),
                "webhook.delete",
                project_id=project.id,
                before={"webhook": hook.id, "host": host_of(url), "events": hook.events},
            )
            session.flush()
        return webhook_views(session, context.keyring, project, [hook])[0]


def try_out(context: ServiceContext, caller: Principal, webhook_id: str) -> DeliveryView:
    """A call that a person asks for, to see whether it arrives. The controller makes it, as any other. Raises
    `webhook_not_found`, `project_not_found` for a project in the trash, and `invalid_request` for a webhook that was
    deleted."""
    with context.database.transaction() as session:
        project, hook = _hook_to_call(session, caller, webhook_id)
        body = Event(
            type=EventType.TEST,
            timestamp=database_now(session),
            data=EventData(project=project.name, reason=f"asked for by {caller.name}"),
        )
        subject = secrets.token_hex(8)
        insert_absent(session, WebhookDelivery, [delivery_row(hook.id, subject, body)])
        record_event(
            session,
            Actor.person(caller),
            "webhook.test",
            project_id=project.id,
            after={"webhook": hook.id, "host": host_of(_url_of(context.keyring, hook))},
        )
        made = select(WebhookDelivery).where(WebhookDelivery.webhook_id == hook.id, WebhookDelivery.subject == subject)
        return delivery_view(session.execute(made).scalar_one())


def redeliver(
    context: ServiceContext, caller: Principal, webhook_id: str, called: str, key: str | None = None
) -> DeliveryView:
    """Has a call made again, also one that has arrived: the same body and `webhook-id`, due at once, with as many tries
    as a new one. The controller makes it. A call that is being made now is not made twice: if it fails, it has as many
    tries from then on. `key`: the client's Idempotency-Key. Raises `webhook_not_found`, `delivery_not_found`,
    `project_not_found` for a project in the trash, `invalid_request` for a webhook that was deleted, and
    `idempotency_key_reused`."""
    repeat = Repeatable(caller.token_id, key, digest_of("redelivery", webhook_id, called))
    with context.database.transaction() as session:
        project, hook = _hook_to_call(session, caller, webhook_id)
        if repeat.earlier(session) is not None:
            return delivery_view(_delivery(session, hook, called))
        row = _delivery(session, hook, called, locked=True)
        now = database_now(session)
        repeat.made(session, called)
        record_event(
            session,
            Actor.person(caller),
            "webhook.redeliver",
            project_id=project.id,
            before={"tries": row.tries, "status": row.last_status, "error": row.last_error},
            after={"webhook": hook.id, "delivery": called, "host": host_of(_url_of(context.keyring, hook))},
        )
        if lease.is_taken(row, now):
            row.tries = 1  # the one that is being made
        else:
            lease.end_locked(row)  # of a process that has died at it, or answers too late
            row.tries, row.next_try_at = 0, now
        row.delivered_at = row.given_up_at = row.last_status = row.last_error = None
        session.flush()
        return delivery_view(row)


def _hook_to_call(session: Session, caller: Principal, webhook_id: str) -> tuple[Project, Webhook]:
    project, hook = webhook_by_id(session, caller, webhook_id)
    refuse_if_deleted(project)
    if hook.deleted_at is not None:
        raise ProblemError(ProblemCode.INVALID_REQUEST, f"The webhook {webhook_id} was deleted. Make it anew.")
    return project, hook


def _delivery(session: Session, hook: Webhook, called: str, *, locked: bool = False) -> WebhookDelivery:
    """`called`: the call's `webhook-id`. Raises `delivery_not_found`."""
    number = called.rpartition("_")[2]
    row = None
    if re.fullmatch("[0-9]{1,18}", number):
        query = select(WebhookDelivery).where(WebhookDelivery.id == int(number), WebhookDelivery.webhook_id == hook.id)
        row = session.scalar(query.with_for_update() if locked else query)
    if row is None or delivery_id(row) != called:
        raise ProblemError(
            ProblemCode.DELIVERY_NOT_FOUND,
            f"The webhook {hook.id} has no call {called!r}. Correct the id; `holdfast webhooks deliveries {hook.id}` "
            "shows them. Calls that were over long ago are forgotten.",
            webhook=hook.id,
        )
    return row


_CURSOR = "deliveries"


def list_webhooks(context: ServiceContext, caller: Principal, project_name: str) -> list[WebhookView]:
    """All that are not deleted: there are few. For the project's administrators: a URL may hold a secret."""
    with context.database.read() as session:
        project = project_named(session, caller, project_name)
        hooks = session.scalars(
            select(Webhook)
            .where(Webhook.project_id == project.id, Webhook.deleted_at.is_(None))
            .order_by(Webhook.created_at, Webhook.id)
        ).all()
        return webhook_views(session, context.keyring, project, hooks)


def show_webhook(context: ServiceContext, caller: Principal, webhook_id: str) -> WebhookView:
    """Raises `webhook_not_found`."""
    with context.database.read() as session:
        project, hook = webhook_by_id(session, caller, webhook_id)
        return webhook_views(session, context.keyring, project, [hook])[0]


def show_delivery(context: ServiceContext, caller: Principal, webhook_id: str, called: str) -> DeliveryView:
    """Raises `webhook_not_found` and `delivery_not_found`."""
    with context.database.read() as session:
        _, hook = webhook_by_id(session, caller, webhook_id)
        return delivery_view(_delivery(session, hook, called))


def list_deliveries(
    context: ServiceContext, caller: Principal, webhook_id: str, *, cursor: str | None, limit: int
) -> Page[DeliveryView]:
    """The newest first. Raises `webhook_not_found`."""
    with context.database.read() as session:
        _, hook = webhook_by_id(session, caller, webhook_id)
        query = select(WebhookDelivery).where(WebhookDelivery.webhook_id == hook.id)
        if cursor is not None:
            query = query.where(WebhookDelivery.id < decode_cursor(_CURSOR, cursor, int)[0])
        found = session.scalars(query.order_by(WebhookDelivery.id.desc()).limit(limit + 1)).all()
        rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (row.id,))
        return Page(items=[delivery_view(row) for row in rows], next_cursor=next_cursor)
