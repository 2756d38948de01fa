"""What checkpoints and copies add up to now: a tally and the deltas that are not in it yet, in one statement, so that a
delta is not counted twice or missed while the controller moves it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, func, select, union_all
from sqlalchemy.orm import Session

from holdfast_protocol.states import Tier
from holdfast_service.context import ServiceContext
from holdfast_service.copies.stored_bytes import CountedBytes, KeptFor
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.tallies import (
    ByteDelta,
    ByteTally,
    CheckpointDelta,
    CheckpointTally,
    Counted,
    ListDelta,
    ListTally,
    RecountMark,
    TallyComparison,
)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """As `CheckpointSums` of the tables."""

    uploading: int = 0
    committed: int = 0
    logical_bytes: int = 0
    deduplicated_bytes: int = 0
    ever_committed: int = 0
    ever_aborted: int = 0
    ever_chunk_bytes: int = 0
    ever_uploaded_bytes: int = 0
    ever_deduplicated_bytes: int = 0


SUMMED = tuple(each.name for each in fields(Sums))


def sums_of_projects(session: Session, project_ids: Collection[str]) -> dict[str, Sums]:
    """By project id, of all its runs together."""
    tallies = select(CheckpointTally.project_id, *_columns(CheckpointTally)).where(
        CheckpointTally.run_id == "", CheckpointTally.project_id.in_(project_ids)
    )
    deltas = select(CheckpointDelta.project_id, *_columns(CheckpointDelta)).where(
        CheckpointDelta.project_id.in_(project_ids)
    )
    return _added(session, project_ids, tallies, deltas)


def sums_of_runs(session: Session, project_ids: str | Collection[str], run_ids: Collection[str]) -> dict[str, Sums]:
    """By run id. `project_ids`: the projects of all these runs."""
    owners = [project_ids] if isinstance(project_ids, str) else project_ids
    tallies = select(CheckpointTally.run_id, *_columns(CheckpointTally)).where(
        CheckpointTally.project_id.in_(owners), CheckpointTally.run_id.in_(run_ids)
    )
    deltas = select(CheckpointDelta.run_id, *_columns(CheckpointDelta)).where(
        CheckpointDelta.project_id.in_(owners), CheckpointDelta.run_id.in_(run_ids)
    )
    return _added(session, run_ids, tallies, deltas)


def _columns(table: type[CheckpointTally | CheckpointDelta]) -> list[Any]:
    return [getattr(table, name) for name in SUMMED]


def _added(session: Session, ids: Collection[str], *parts: Select[Any]) -> dict[str, Sums]:
    of, *summed = list(union_all(*parts).subquery().c)
    sums: list[ColumnElement[int]] = [func.sum(column) for column in summed]
    added = select(of, *sums).group_by(of)
    found = {
        key: Sums(**{name: int(value) for name, value in zip(SUMMED, values, strict=True)})
        for key, *values in session.execute(added)
    }
    return {key: found.get(key, Sums()) for key in ids}


_KEPT_FOR = {
    Counted.ARRIVING: KeptFor.ARRIVING,
    Counted.COMMITTED: KeptFor.COMMITTED,
    Counted.TRASHED: KeptFor.TRASHED,
    Counted.PENDING_COLLECTION: KeptFor.PENDING_COLLECTION,
}
_WHY = Counted.PENDING_COLLECTION
"""The bits that say what it is kept for."""


def counted_bytes(session: Session, project_ids: Collection[str] | None = None) -> list[CountedBytes]:
    """Of these projects, or all. All copies are in it, as of now; what each is kept for is as of `counted_until`."""
    columns = (
        (table.project_id, table.store_id, table.storage_class, table.counted, table.copies, table.bytes)
        for table in (ByteTally, ByteDelta)
    )
    of = () if project_ids is None else (project_ids,)
    tallies, deltas = (select(*each).where(*(each[0].in_(ids) for ids in of)) for each in columns)
    rows = union_all(tallies, deltas).subquery()
    key = (rows.c.project_id, rows.c.store_id, rows.c.storage_class, rows.c.counted)
    added = select(*key, func.sum(rows.c.copies), func.sum(rows.c.bytes)).group_by(*key)
    return [
        CountedBytes(
            project_id=project_id,
            store_id=store_id,
            storage_class=storage_class or None,
            tier=_tier(counted),
            kept_for=_KEPT_FOR[Counted(counted & _WHY)],
            copies=int(copies),
            bytes=int(size),
            pinned_bytes=int(size) if counted & Counted.PINNED else 0,
            held_bytes=int(size) if counted & Counted.HELD else 0,
        )
        for project_id, store_id, storage_class, counted, copies, size in session.execute(added)
        if copies or size
    ]


def _tier(counted: int) -> Tier:
    if counted & Counted.COLD:
        return Tier.COLD
    return Tier.THAWING if counted & Counted.THAWING else Tier.HOT


class Stored(NamedTuple):
    bytes: int = 0
    copies: int = 0


def stored_bytes(session: Session, project_ids: Collection[str], *, store_id: int | None = None) -> dict[str, int]:
    """By project id; everything that may be in the stores, uploads that are under way among it. `store_id`: in that one
    only."""
    return {each: stored.bytes for each, stored in _stored(session, project_ids, store_id=store_id).items()}


def _stored(session: Session, project_ids: Collection[str], *, store_id: int | None) -> dict[str, Stored]:
    """Exact: under a project's lock it has what every transaction before has reserved (rule quota-reserved)."""
    parts = []
    for table in (ByteTally, ByteDelta):
        part = select(table.project_id, table.bytes, table.copies).where(table.project_id.in_(project_ids))
        parts.append(part if store_id is None else part.where(table.store_id == store_id))
    rows = union_all(*parts).subquery()
    of = rows.c.project_id
    added = select(of, func.sum(rows.c.bytes), func.sum(rows.c.copies)).group_by(of)
    found = {project_id: Stored(int(size), int(copies)) for project_id, size, copies in session.execute(added)}
    return {project_id: found.get(project_id, Stored()) for project_id in project_ids}


def list_entries(session: Session, project_ids: Collection[str]) -> dict[str, int]:
    """By project id: the entries of its chunk lists, of which equal ones are one. Lists that an older version has made
    are in it when the controller `tally` has counted them."""
    parts = (
        select(table.project_id, table.entries).where(table.project_id.in_(project_ids))
        for table in (ListTally, ListDelta)
    )
    rows = union_all(*parts).subquery()
    added = select(rows.c.project_id, func.sum(rows.c.entries)).group_by(rows.c.project_id)
    found = {project_id: int(entries) for project_id, entries in session.execute(added)}
    return {project_id: found.get(project_id, 0) for project_id in project_ids}


def counted_until(session: Session) -> datetime | None:
    """Every change before it is in the split of the bytes by what they are kept for. None: the catalog was migrated,
    and its copies were not all looked at yet."""
    now = database_now(session)
    if session.scalar(select(TallyComparison.ended_at).where(TallyComparison.kind == "copies")) is None:
        return None
    oldest = session.scalar(select(func.min(RecountMark.due_at)).where(RecountMark.due_at <= now))
    return oldest or now


def copies_against_quota(session: Session, context: ServiceContext, project_ids: Collection[str]) -> dict[str, Stored]:
    """By project id: what is in the primary store, which jobs write to. Copies elsewhere do not count, whether this
    process has that store attached or not: a replication policy must not stop the jobs' saves."""
    return _stored(session, project_ids, store_id=context.store_id)
