"""Marks copies as `deleting`, deletes their bytes, settles them as `gone` (protocol rule 24).

The order is the guard: the chunks are locked FOR UPDATE, which waits for nobody and which a writer's FOR KEY SHARE
excludes; references are asked for again in a LATER statement, which sees what the writer committed; the mark is
committed; only then do bytes go, by exact key. A process that dies in between leaves `deleting` rows, which are taken
up again when their lease has run out: deleting twice is fine, for a key is never used again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CopyState
from holdfast_service.catalog.copies import object_key
from holdfast_service.catalog.tables import Chunk, Copy
from holdfast_service.clock import database_now
from holdfast_service.collect.garbage import may_go
from holdfast_service.context import ServiceContext
from holdfast_service.stores.base import ObjectKey, StoreError

BATCH = 200
_LEASE = timedelta(minutes=10)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Doomed:
    copy_id: int
    key: ObjectKey
    version_id: str | None
    stored_bytes: int


def delete_garbage(context: ServiceContext) -> tuple[int, int]:
    """How many copies of at most BATCH went, and their bytes. What the store does not delete now is tried again."""
    with context.database.transaction() as session:
        doomed = _mark(session, context) + _take_up(session, context)
    gone = [each for each in doomed if _delete(context, each)]
    if gone:
        with context.database.transaction() as session:
            session.execute(
                update(Copy)
                .where(Copy.id.in_([each.copy_id for each in gone]), Copy.state == CopyState.DELETING)
                .values(state=CopyState.GONE, leased_until=None)
            )
    return len(gone), sum(each.stored_bytes for each in gone)


def _mark(session: Session, context: ServiceContext) -> list[_Doomed]:
    now = database_now(session)
    condition = may_go(context.store_id, now, timedelta(seconds=context.settings.longest_upload_seconds))
    chunk_ids = session.scalars(select(Copy.chunk_id).where(condition).order_by(Copy.id).limit(BATCH)).unique().all()
    if not chunk_ids:
        return []
    locked = session.scalars(
        select(Chunk.id).where(Chunk.id.in_(chunk_ids)).order_by(Chunk.digest).with_for_update(skip_locked=True)
    ).all()
    # A statement of its own: the one above may have taken its snapshot before the last reference was committed.
    rows = _copies(session, Copy.chunk_id.in_(locked) & condition)
    return _claim(session, rows)


def _take_up(session: Session, context: ServiceContext) -> list[_Doomed]:
    """What a process that died had marked."""
    now = database_now(session)
    rows = _copies(
        session,
        (Copy.store_id == context.store_id)
        & (Copy.state == CopyState.DELETING)
        & or_(Copy.leased_until.is_(None), Copy.leased_until < now),
    )
    return _claim(session, rows)


def _copies(session: Session, condition: object) -> Sequence[tuple[Copy, str]]:
    statement = (
        select(Copy, Chunk.digest)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .where(condition)  # type: ignore[arg-type]
        .order_by(Copy.id)
        .limit(BATCH)
        .with_for_update(of=Copy, skip_locked=True)
    )
    return [(row.Copy, row.digest) for row in session.execute(statement)]


def _claim(session: Session, rows: Sequence[tuple[Copy, str]]) -> list[_Doomed]:
    leased_until = database_now(session) + _LEASE
    doomed = []
    for copy, digest in rows:
        copy.state = CopyState.DELETING
        copy.leased_until = leased_until
        key = object_key(copy.project_id, digest, copy)
        doomed.append(_Doomed(copy.id, key, copy.version_id, copy.stored_bytes))
    session.flush()
    return doomed


def _delete(context: ServiceContext, doomed: _Doomed) -> bool:
    try:
        context.store.delete(doomed.key, doomed.version_id)
    except StoreError as error:
        _log.warning("the store does not delete %s: %s", doomed.key.path, error)
        return False
    return True
