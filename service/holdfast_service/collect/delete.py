"""Deletes the bytes of marked copies, and settles them as `gone`.

No transaction is open meanwhile. A process that dies in between leaves `deleting` rows, which are taken up again when
their lease has run out: deleting twice is fine, for a key is never used again. What a store does not delete now stays
marked: while it is away, it alone is waited for; what it refuses (Object Lock) is tried again later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy import update

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.custody_tables import CollectCandidate
from holdfast_service.catalog.tables import Copy
from holdfast_service.clock import database_now
from holdfast_service.collect.mark import Doomed
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import StoreError

_AT_ONCE = 8
_AGAIN_IF_AWAY = timedelta(seconds=30)
# A lock ends by a date or by a person: neither is a matter of seconds.
_AGAIN_IF_REFUSED = timedelta(hours=1)

_log = logging.getLogger(__name__)


@dataclass
class Deleted:
    """What went, and what did not: `problems` by store, the last reason of each."""

    copies: int = 0
    bytes: int = 0
    kept: int = 0
    problems: dict[int, str] = field(default_factory=dict)
    away: dict[int, StoreError] = field(default_factory=dict)

    def add(self, other: Deleted) -> None:
        self.copies += other.copies
        self.bytes += other.bytes
        self.kept += other.kept
        self.problems |= other.problems
        self.away |= other.away


def delete_marked(context: ServiceContext, doomed: Sequence[Doomed]) -> Deleted:
    """All of them, as far as their stores let them go now."""
    result = Deleted()
    if not doomed:
        return result
    with ThreadPoolExecutor(min(_AT_ONCE, len(doomed)), thread_name_prefix="holdfast-delete") as threads:
        failures = list(threads.map(lambda each: _delete(context, each, result.away), doomed))
    gone = [each for each, failure in zip(doomed, failures, strict=True) if failure is None]
    left = [(each, failure) for each, failure in zip(doomed, failures, strict=True) if failure is not None]
    result.copies, result.bytes, result.kept = len(gone), sum(each.stored_bytes for each in gone), len(left)
    result.problems = {each.store_id: str(failure) for each, failure in left}
    _settle(context, gone, left)
    return result


def _delete(context: ServiceContext, doomed: Doomed, away: dict[int, StoreError]) -> StoreError | None:
    store = context.store_of(doomed.store_id)
    assert store is not None  # only what is attached is marked
    if doomed.store_id in away:
        return away[doomed.store_id]
    try:
        # What a ticket could overwrite may have versions that no row knows: they go as well.
        store.delete(doomed.key, None if doomed.key.version_id else doomed.version_id)
    except StoreError as error:
        if error.retryable:
            away[doomed.store_id] = error
        _log.warning("the store does not delete %s: %s", doomed.key.path, error)
        return error
    return None


def _settle(context: ServiceContext, gone: Sequence[Doomed], left: Sequence[tuple[Doomed, StoreError]]) -> None:
    with context.database.transaction() as session:
        now = database_now(session)
        # Deleted twice is deleted: whoever took it up after this lease ended finds it gone, and does no harm.
        session.execute(
            update(Copy)
            .where(Copy.id.in_([each.copy_id for each in gone]), Copy.state == CopyState.DELETING)
            .values(state=CopyState.GONE, leased_until=None)
        )
        session.execute(
            update(CollectCandidate)
            .where(CollectCandidate.chunk_id.in_({each.chunk_id for each in gone}))
            .values(due_at=now)
        )
        for each, failure in left:
            again = _AGAIN_IF_AWAY if failure.retryable else _AGAIN_IF_REFUSED
            session.execute(
                update(Copy)
                .where(Copy.id == each.copy_id, Copy.leased_until == each.leased_until)
                .values(leased_until=now + again)
            )
