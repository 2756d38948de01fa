"""Reads the copies that nobody but their client has hashed, and those that were left suspect (protocol rule 14).

Afterwards a copy is `read`, and other attempts may rely on it; or it is bad, and the checkpoints that need it are
marked. Each copy is claimed with a lease, so any number of processes share the work, and a killed one's copies come due
again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import or_, select, text, update
from sqlalchemy.orm import Session

from holdfast_service.catalog.reread import Claim, Finding, claim, read_back, settle
from holdfast_service.catalog.tables import COPY_TO_READ, Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import StoreError

_BATCH = 8
_LEASE_SECONDS = 600
# A copy that the store could not give is not the first one again in the next round, or it would hold up the others.
_AFTER_FAILURE_SECONDS = 30


@dataclass(frozen=True)
class ProveReport:
    good: int = 0
    bad: int = 0
    read_bytes: int = 0
    corrupt_checkpoints: tuple[str, ...] = ()


def tick(context: ServiceContext) -> ProveReport:
    """Reads for about one interval, or until nothing is due. Raises StoreError if the store cannot tell."""
    ends_at = time.monotonic() + context.settings.controller_interval_seconds
    pace = Pace(context.settings.prove_bytes_per_second)
    good = bad = 0
    corrupt: set[str] = set()
    while claims := context.database.run(lambda session: _claim_due(session, context)):
        for position, claimed in enumerate(claims):
            try:
                finding = read_back(context, claimed, pace.spend)
            except StoreError:
                _put_off(context, claims[position:])
                raise
            marked = settle(context, claimed, finding)
            if marked is None:
                continue  # it took longer than the lease; somebody else has it now
            good, bad = good + (finding is Finding.GOOD), bad + (finding is not Finding.GOOD)
            corrupt.update(marked)
        if time.monotonic() >= ends_at:
            break
    return ProveReport(good, bad, pace.spent_bytes, tuple(sorted(corrupt)))


class Pace:
    """Keeps the average at `bytes_per_second`: trainers need the store more than this does."""

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._began = time.monotonic()
        self.spent_bytes = 0

    def spend(self, read_bytes: int) -> None:
        self.spent_bytes += read_bytes
        ahead = self.spent_bytes / self._bytes_per_second - (time.monotonic() - self._began)
        if ahead > 0:
            time.sleep(ahead)


def _claim_due(session: Session, context: ServiceContext) -> list[Claim]:
    now = database_now(session)
    rows = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(
            text(f"({COPY_TO_READ})"),
            Copy.store_id == context.store_id,
            or_(Copy.leased_until.is_(None), Copy.leased_until <= now),
        )
        .order_by(Copy.id)
        .limit(_BATCH)
        .with_for_update(of=Copy, skip_locked=True)
    ).all()
    until = now + timedelta(seconds=_LEASE_SECONDS)
    return [claim(session, chunk, copy, until, suspect=False) for copy, chunk in rows]


def _put_off(context: ServiceContext, claims: list[Claim]) -> None:
    with context.database.transaction() as session:
        until = database_now(session) + timedelta(seconds=_AFTER_FAILURE_SECONDS)
        for position, claimed in enumerate(claims):
            session.execute(
                update(Copy)
                .where(Copy.id == claimed.copy_id, Copy.leased_until == claimed.leased_until)
                .values(leased_until=until if position == 0 else None)
            )
