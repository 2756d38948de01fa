"""How far the clocks of the attached stores are from this process's own, which dates what it signs."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast_protocol.stores import StoreClock
from holdfast_service.attached_store import AttachedStore
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import MountedStore, StoreError

SIGNATURE_SKEW_SECONDS = 900
"""S3 and GCS refuse what was signed so long ago, or so far ahead of their time."""


def store_clocks(context: ServiceContext) -> list[StoreClock]:
    """By role, the primary store first. Asks each of them."""
    return [_compared(attached, context.settings.ticket_seconds) for attached in context.stores]


def _compared(attached: AttachedStore, ticket_seconds: int) -> StoreClock:
    asked_at = datetime.now(UTC)
    try:
        told = attached.store.clock()
    except StoreError as error:
        return StoreClock(role=attached.role, ahead_seconds=None, tolerated_seconds=None, problem=str(error))
    ahead = (told - asked_at - (datetime.now(UTC) - asked_at) / 2).total_seconds()
    return StoreClock(
        role=attached.role, ahead_seconds=ahead, tolerated_seconds=_tolerated(attached, ahead, ticket_seconds)
    )


def _tolerated(attached: AttachedStore, ahead_seconds: float, ticket_seconds: int) -> float | None:
    """A mounted store's URLs are signed and checked by the service. By a store that is ahead a ticket ends early."""
    if isinstance(attached.store, MountedStore):
        return None
    return min(SIGNATURE_SKEW_SECONDS, ticket_seconds) if ahead_seconds > 0 else SIGNATURE_SKEW_SECONDS
