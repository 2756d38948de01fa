"""Looks again at a copy in the colder place that was not made just now, before the hot one goes in favour of it: nobody
may have looked at it for months, and what is hot may be all that is good.

    claim its row (it stays what it is) -> the store's own class, size and SHA-256, or else read and hash it
      -> good, or marked bad, and the hot one stays
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from holdfast_service.catalog.archived import note_archived, note_class, store_says
from holdfast_service.catalog.audit import Actor
from holdfast_service.catalog.reread import Claim, Finding, claim, let_go, read_back, settle
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import ObjectArchived, StoreError
from holdfast_service.tiers.movable import Place, hotter_copy, not_kept_back

CONTROLLER = Actor.controller("tiers")


def could_go(session: Session, context: ServiceContext, chunk_ids: Collection[int], place: Place) -> Sequence[int]:
    """Those of the chunks whose hot copy nothing keeps, if only the place has a good one."""
    kept_back = not_kept_back(database_now(session))
    statement = select(Copy.chunk_id).where(Copy.chunk_id.in_(chunk_ids), hotter_copy(context, place), kept_back)
    return session.scalars(statement.distinct().order_by(Copy.chunk_id)).all()


def still_there(context: ServiceContext, chunk_id: int, place: Place, on_bytes: Callable[[int], None]) -> int | None:
    """The chunk's copy in the place, if it was found good now; None also while somebody else is at work on it. Raises
    StoreError if the store cannot tell."""
    claimed = context.database.run(lambda session: _claim(session, context, chunk_id, place))
    if claimed is None:
        return None
    try:
        good = _is_good(context, claimed, place, on_bytes)
    except StoreError:
        let_go(context, claimed)
        raise
    return claimed.copy_id if good else None


def _claim(session: Session, context: ServiceContext, chunk_id: int, place: Place) -> Claim | None:
    now = database_now(session)
    row = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(
            Copy.chunk_id == chunk_id,
            place.holds(Copy),
            or_(Copy.leased_until.is_(None), Copy.leased_until <= now),
        )
        .order_by(Copy.id)
        .limit(1)
        .with_for_update(of=Copy, skip_locked=True)
    ).one_or_none()
    until = now + timedelta(seconds=context.settings.chunk_lease_seconds)
    return None if row is None else claim(session, row.Chunk, row.Copy, until, suspect=False)


def _is_good(context: ServiceContext, claimed: Claim, place: Place, on_bytes: Callable[[int], None]) -> bool:
    says = store_says(context, claimed)
    finding = None if says is None else says.finding
    # Whatever class the cold store keeps it in is its own affair.
    moved = says is not None and place.storage_class not in (None, says.storage_class)
    if says is not None and moved and finding in (None, Finding.GOOD):
        note_class(context, claimed, says.storage_class, CONTROLLER)
        return False
    if finding is Finding.GOOD:
        let_go(context, claimed)  # nobody has read it
        return True
    if finding is None:
        try:
            finding = read_back(context, claimed, on_bytes)
        except ObjectArchived:
            finding = note_archived(context, claimed, CONTROLLER)
    if finding is not None:
        settle(context, claimed, finding, CONTROLLER)
    return finding is Finding.GOOD
