"""One pass of the controller `tiers`: thaws first, because people wait for them; then where checkpoints belong, and
then what is due moves. Nothing moves in a store that does not say that it is this catalog's, in this epoch (rule
fencing-token)."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import func, or_, select, text
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState, Tier
from holdfast_service.attached_stores.ownership import ForeignStoreError, deletes_are_allowed
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import THAWED, TO_COOL, Checkpoint, Copy
from holdfast_service.settings import ServiceSettings
from holdfast_service.stores.base import StoreError
from holdfast_service.stores.read_rate_limit import ReadRateLimit
from holdfast_service.tiers.cool import cool_checkpoint, due_checkpoints
from holdfast_service.tiers.rules import decide
from holdfast_service.tiers.thaw import Thawed, advance_thaw, thawing_checkpoints
from holdfast_service.work.report import Backlog, ControllerLoop, ReconcileReport

_CHECKPOINTS_AT_ONCE = 50
# Nothing here is a matter of seconds, and judging all runs reads much of the catalog.
EVERY_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class TiersReport(ReconcileReport):
    """`done` are chunks that moved, either way. `decided`: checkpoints that belong somewhere else than before."""

    decided: int = 0
    moved_bytes: int = 0
    retired_copies: int = 0
    retired_bytes: int = 0
    cold_checkpoints: tuple[str, ...] = ()
    thawed_checkpoints: int = 0
    ended_thaws: int = 0


def reconcile(context: ServiceContext) -> TiersReport:
    """Works for about one interval, or until nothing is due."""
    limit = ReadRateLimit(context.settings.copy_bytes_per_second)

    def go_on() -> bool:
        return not context.stopping.is_set() and time.monotonic() < ends_at

    with context.database.read() as session:
        thawing = thawing_checkpoints(session)
    thawed = Thawed()
    for checkpoint_id in thawing:
        advance_thaw(context, checkpoint_id, thawed)
    decided = decide(context)
    with context.database.read() as session:
        due = due_checkpoints(session, _CHECKPOINTS_AT_ONCE)
    done = retired = moved_bytes = retired_bytes = failed = 0
    error = thawed.error
    cold: set[str] = set()
    refusal = _refusal(context) if due else None
    # From here on: thaws, and what it took to find the work, take nothing from doing it.
    ends_at = time.monotonic() + context.settings.controller_interval_seconds * EVERY_ROUNDS
    for checkpoint_id, target in due if refusal is None else ():
        if not go_on():
            break
        cooled = cool_checkpoint(context, checkpoint_id, target, on_bytes=limit.acquire, go_on=go_on)
        done, moved_bytes = done + cooled.moved, moved_bytes + cooled.moved_bytes
        retired, retired_bytes = retired + cooled.retired, retired_bytes + cooled.retired_bytes
        failed, error = failed + cooled.failed, cooled.error or error
        cold |= cooled.cold
        if cooled.unavailable:
            break
    return TiersReport(
        done=done + thawed.chunks,
        failed=failed + thawed.failed,
        error=error or refusal,
        decided=decided,
        moved_bytes=moved_bytes,
        retired_copies=retired,
        retired_bytes=retired_bytes,
        cold_checkpoints=tuple(sorted(cold)),
        thawed_checkpoints=thawed.checkpoints,
        ended_thaws=thawed.ended,
    )


def _refusal(context: ServiceContext) -> str | None:
    """Why nothing may move now."""
    try:
        allowed = deletes_are_allowed(context.store, context.store_id, context.catalog_id, context.epoch, context.claim)
    except ForeignStoreError:
        allowed = False
    except StoreError as error:
        return str(error)
    return None if allowed else "the store does not say that it belongs to this catalog in this epoch"


def backlog(session: Session, context: ServiceContext) -> Backlog:
    """`due` are checkpoints that were never gone through, or are asked for; `leased` the copies under way."""
    cooling = select(func.count(), func.min(Checkpoint.committed_at)).where(
        text(TO_COOL), Checkpoint.tier_checked_at.is_(None)
    )
    thawing = select(func.count(), func.min(Checkpoint.thaw_requested_at)).where(
        text(THAWED), Checkpoint.tier != Tier.HOT
    )
    waits, cool_since = session.execute(cooling).one()
    asked, thaw_since = session.execute(thawing).one()
    now = database_now(session)
    leased = session.scalar(
        select(func.count()).where(
            Copy.store_id.in_(context.store_ids),
            or_(
                Copy.state == CopyState.THAWING,
                (Copy.state == CopyState.COPYING) & Copy.storage_class.is_not(None),
            ),
            Copy.leased_until > now,
        )
    )
    oldest = min((each for each in (cool_since, thaw_since) if each is not None), default=None)
    return Backlog(int(waits) + int(asked), int(leased or 0), oldest)


def loops(settings: ServiceSettings) -> tuple[ControllerLoop, ...]:
    """The controllers of this room."""
    return (ControllerLoop("tiers", settings.controller_interval_seconds * EVERY_ROUNDS, reconcile, backlog),)
