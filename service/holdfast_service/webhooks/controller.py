"""The controller `webhooks`: makes the calls that are due, and forgets those that were over long ago."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import structlog
from sqlalchemy import ColumnElement, Select, and_, delete, exists, func, or_, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.events import Event
from holdfast_protocol.webhooks import WebhookFormat
from holdfast_service.context import ServiceContext
from holdfast_service.db import lease
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Project
from holdfast_service.db.tables.webhooks import TO_DELIVER, Webhook, WebhookDelivery
from holdfast_service.release import VERSION
from holdfast_service.secrets.kept import hook_secrets
from holdfast_service.secrets.keyring import DecryptionError
from holdfast_service.settings import ServiceSettings
from holdfast_service.webhooks.deliver import (
    LONGEST_PAUSE_SECONDS,
    WHOLE_SECONDS,
    Answer,
    call,
    pause_seconds,
    signature,
)
from holdfast_service.webhooks.formats import KEEPS_ALERTS, ROUTINE, TURNS, render
from holdfast_service.webhooks.manage import delivery_id
from holdfast_service.webhooks.target import RefusedTargetError, find_target
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

_AT_ONCE = 1000
"""In one transaction: after a receiver's long outage there are many, and a transaction that leaves a new call waits
behind them."""
_UNSYNCHRONIZED = {"synchronize_session": False}


def forget_old(context: ServiceContext) -> None:
    """Forgets calls that were over long ago, and deleted webhooks with the last of theirs. Called by each pass. Writes
    nothing if nothing is old. A process that dies in between leaves the rest to the next pass."""
    kept_for = timedelta(days=context.settings.keep_webhook_calls_days)
    more = _is_there(context, partial(_is_over, kept_for=kept_for))
    while more and not context.stopping.is_set():
        more = _forget_calls(context, kept_for)
    if _is_there(context, partial(_is_unused, kept_for=kept_for)):
        with context.database.transaction() as session:
            unused = _is_unused(database_now(session), kept_for)
            session.execute(delete(Webhook).where(unused), execution_options=_UNSYNCHRONIZED)


def _is_there(context: ServiceContext, which: Callable[[datetime], ColumnElement[bool]]) -> bool:
    with context.database.read() as session:
        return session.execute(select(exists().where(which(database_now(session))))).scalar_one()


def _forget_calls(context: ServiceContext, kept_for: timedelta) -> bool:
    """Whether there are more."""
    with context.database.transaction() as session:
        old = session.scalars(
            select(WebhookDelivery.id)
            .where(_is_over(database_now(session), kept_for))
            .order_by(WebhookDelivery.created_at)
            .limit(_AT_ONCE)
            .with_for_update(skip_locked=True)
        ).all()
        session.execute(delete(WebhookDelivery).where(WebhookDelivery.id.in_(old)), execution_options=_UNSYNCHRONIZED)
    return len(old) == _AT_ONCE


def _is_over(now: datetime, kept_for: timedelta) -> ColumnElement[bool]:
    """By when it was made, which an index knows: it is over a day or so later."""
    over = or_(WebhookDelivery.delivered_at.is_not(None), WebhookDelivery.given_up_at.is_not(None))
    return and_(WebhookDelivery.created_at < now - kept_for, over)


def _is_unused(now: datetime, kept_for: timedelta) -> ColumnElement[bool]:
    """Deleted so long ago that no transaction leaves a call of it any more."""
    left = exists().where(WebhookDelivery.webhook_id == Webhook.id)
    return and_(Webhook.deleted_at < now - kept_for, ~left)


NAME = "webhooks"
_LEASE_SECONDS = 8 * WHOLE_SECONDS
_CALLS_OF_A_ROUND = 100
# One receiver that does not answer must not keep the others waiting.
_THREADS = 2
_GONE = 410
_LONGEST_PAUSE = timedelta(seconds=LONGEST_PAUSE_SECONDS)

_log = structlog.get_logger("holdfast.webhooks")


@dataclass(frozen=True, kw_only=True)
class WebhooksReport(ReconcileReport):
    given_up: int = 0


@dataclass(frozen=True)
class _Call:
    """What one try needs; nothing of it changes meanwhile."""

    delivery: WebhookDelivery
    hook: Webhook
    at: datetime
    lease_token: str


def reconcile(context: ServiceContext) -> WebhooksReport:
    """One pass: makes the calls that are due. At least once each, with the same id whenever it is made again.

    A call is claimed with a lease, in a transaction of its own, and made outside of any; a process that dies in between
    leaves a call that is made again when the lease is over. A result settles only the try that it belongs to.
    """
    done = failed = given_up = 0
    error: str | None = None
    forget_old(context)
    with context.database.read() as session:
        due = session.execute(select(exists().where(_is_due(database_now(session))))).scalar_one()
    if not due:
        return WebhooksReport()
    tls = ssl.create_default_context()
    for _ in range(_CALLS_OF_A_ROUND):
        if context.stopping.is_set():
            break
        claimed = _claim(context)
        if claimed is None:
            break
        try:
            answer = _make(context, claimed, tls)
        except Exception as bug:  # else the call is the first again when its lease is over, before all of its project
            _log.exception("webhook_not_called", delivery=delivery_id(claimed.delivery))
            answer = Answer(None, f"a bug of the service ({type(bug).__name__}); its log says where")
        if answer.taken:
            done += 1
        else:
            failed += 1
            error = answer.error or f"the receiver has answered {answer.status}"
        given_up += _settle(context, claimed, answer)
    return WebhooksReport(done=done, failed=failed, given_up=given_up, error=error)


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """Calls whose time has come, and those that a process makes."""
    del context
    now = database_now(session)
    due = _is_due(now)
    waiting, oldest, leased = session.execute(
        select(
            func.count().filter(due),
            func.min(WebhookDelivery.next_try_at).filter(due),
            func.count().filter(~lease.is_free(WebhookDelivery.leased_until, now)),
        ).where(text(TO_DELIVER))
    ).one()
    return Backlog(waiting, leased, oldest)


def _is_due(now: datetime) -> ColumnElement[bool]:
    return and_(
        text(TO_DELIVER),
        # No pause is so long: what is due later still was left by a clock that was ahead.
        or_(WebhookDelivery.next_try_at <= now, WebhookDelivery.next_try_at > now + _LONGEST_PAUSE),
        lease.is_free(WebhookDelivery.leased_until, now),
    )


def _claim(context: ServiceContext) -> _Call | None:
    """The call that waits longest, of the projects without a call in hand: one project with many receivers that do not
    answer holds one thread up. What comes by the thousand goes last, and before it receivers that owe an answer. Calls
    of a deleted webhook are given up, and those that would bring an alert back that a later call has ended."""
    while True:
        with context.database.transaction() as session:
            now = database_now(session)
            may_be_made = and_(_is_due(now), Webhook.project_id.not_in(_in_hand(now)))
            first = session.execute(
                select(WebhookDelivery.id, Webhook)
                .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
                .where(may_be_made)
                .order_by(
                    WebhookDelivery.event.in_(ROUTINE),
                    WebhookDelivery.webhook_id.in_(_unanswered()),
                    WebhookDelivery.next_try_at,
                    WebhookDelivery.id,
                )
                .limit(1)
            ).first()
            if first is None:
                return None
            found_id, hook = first
            # Those who claim for one project take turns, and look again at what the one before has left.
            session.execute(select(Project.id).where(Project.id == hook.project_id).with_for_update(key_share=True))
            delivery = session.scalar(
                select(WebhookDelivery)
                .join(Webhook, Webhook.id == WebhookDelivery.webhook_id)
                .where(WebhookDelivery.id == found_id, may_be_made)
                .with_for_update(of=WebhookDelivery)
            )
            if delivery is None:
                continue
            if hook.deleted_at is not None:
                delivery.given_up_at, delivery.last_error = now, "the webhook was deleted"
                continue
            if hook.format in KEEPS_ALERTS and _is_taken_back(session, delivery):
                delivery.given_up_at, delivery.last_error = now, "a later call says otherwise"
                continue
            delivery.tries += 1
            token = lease.claim_locked(session, delivery, seconds=_LEASE_SECONDS)
            return _Call(delivery, hook, now, token)


def _is_taken_back(session: Session, delivery: WebhookDelivery) -> bool:
    """Whether a later call to the same receiver says the opposite, made already or not."""
    turns = next((turns for event, turns in TURNS.items() if event == delivery.event), None)
    if turns is None:
        return False
    said = delivery.body["data"]
    later = session.scalars(
        select(WebhookDelivery.body).where(
            WebhookDelivery.webhook_id == delivery.webhook_id,
            WebhookDelivery.event.in_(turns),
            WebhookDelivery.id > delivery.id,
        )
    )
    return any(
        all(body["data"].get(name) == said.get(name) for name in ("run", "attempt", "store", "quota")) for body in later
    )


def _in_hand(now: datetime) -> Select[str]:
    """The projects with a call that a process makes now."""
    return (
        select(Webhook.project_id)
        .join(WebhookDelivery, WebhookDelivery.webhook_id == Webhook.id)
        .where(text(TO_DELIVER), ~lease.is_free(WebhookDelivery.leased_until, now))
    )


def _unanswered() -> Select[str]:
    """The webhooks that gave no answer at all to a call that is still to be made."""
    return select(WebhookDelivery.webhook_id).where(
        text(TO_DELIVER), WebhookDelivery.last_error.is_not(None), WebhookDelivery.last_status.is_(None)
    )


def _make(context: ServiceContext, claimed: _Call, tls: ssl.SSLContext) -> Answer:
    message_id = delivery_id(claimed.delivery)
    try:
        kept = hook_secrets(context.keyring, claimed.hook)
    except DecryptionError as error:
        _log.warning("webhook_secret_does_not_open", delivery=message_id, reason=str(error))
        return Answer(None, f"its secret does not open: {error}")
    try:
        form = WebhookFormat(claimed.hook.format)
        routing_key = kept.secret.decode() if form is WebhookFormat.PAGERDUTY else None
        body = render(form, Event.model_validate(claimed.delivery.body), claimed.at, routing_key)
    except ValueError:
        return Answer(None, "this version does not know this call; a later one has left it")
    timestamp = int(claimed.at.timestamp())
    try:
        target = find_target(kept.url, context.settings.webhook_hosts)
    except RefusedTargetError as refused:
        return Answer(None, str(refused))
    except OSError as error:
        return Answer(None, f"the host's name cannot be resolved ({type(error).__name__})")
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"holdfast/{VERSION}",
        "Connection": "close",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
    }
    if form is WebhookFormat.STANDARD:
        headers["webhook-signature"] = signature(kept.secret, message_id, timestamp, body)
    answer = call(target, body, headers, tls)
    _log.info("webhook_called", delivery=message_id, host=target.host, status=answer.status, error=answer.error)
    return answer


def _settle(context: ServiceContext, claimed: _Call, answer: Answer) -> int:
    """1 if it is given up. Nothing, if the lease ran out and another process has made the call again."""
    with context.database.transaction() as session:
        now = database_now(session)
        mine = WebhookDelivery.id == claimed.delivery.id
        delivery = lease.locked(session, WebhookDelivery, claimed.lease_token, mine, text(TO_DELIVER))
        if delivery is None:
            return 0
        lease.end_locked(delivery)
        delivery.last_status, delivery.last_error = answer.status, answer.error
        if answer.taken:
            delivery.delivered_at = now
            return 0
        pause = None if answer.status == _GONE else pause_seconds(delivery.tries)
        if pause is None:
            delivery.given_up_at = now
            return 1
        delivery.next_try_at = now + timedelta(seconds=pause)
        return 0


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop(NAME, settings.controller_interval_seconds, reconcile, backlog, threads=_THREADS),)
