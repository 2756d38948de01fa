"""Forgets calls that were over long ago, and deleted webhooks with the last of theirs. Called by each round."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import ColumnElement, and_, delete, exists, or_, select

from holdfast_service.catalog.webhook_tables import Webhook, WebhookDelivery
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext

_AT_ONCE = 1000
"""In one transaction: after a receiver's long outage there are many, and who leaves a new call waits behind them."""
_UNSYNCHRONIZED = {"synchronize_session": False}


def forget_old(context: ServiceContext) -> None:
    """Writes nothing where nothing is old. Whoever dies in between leaves the rest to the next round."""
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
    """Deleted so long ago that nobody leaves a call of it any more."""
    left = exists().where(WebhookDelivery.webhook_id == Webhook.id)
    return and_(Webhook.deleted_at < now - kept_for, ~left)
