"""Compares the sums with the rows, in slices. What differs has drifted: it is put right, logged and counted, and the
count must stay 0.

    copies       as what each is counted, with as what it should be: BATCH copies at a time
    bytes        then the sums with the copies, in one snapshot: BATCH copies in a statement
    checkpoints  the sums of each run with its checkpoints, some runs in a snapshot; then those of projects with theirs
    lists        counts the entries of lists that an older version has made; then the sums with the lists

A migrated catalog has counted all its copies as arriving. The first comparison counts them, and none has drifted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, case, func, insert, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.tables.core import Checkpoint, ChunkList, ChunkListEntry, Copy, Run
from holdfast_service.db.tables.tallies import (
    ByteDelta,
    ByteTally,
    CheckpointTally,
    ListDelta,
    ListTally,
    RecountMark,
    TallyComparison,
)
from holdfast_service.tallies.fold import add_to_checkpoint_tallies
from holdfast_service.tallies.recount import add_deltas, is_due, mark_ends, recount
from holdfast_service.tallies.sums import SUMMED, sums_of_runs

BATCH = 1000
_COPIES_IN_A_SUM = 20_000
_RUNS = 20
_UNSYNCHRONIZED = {"synchronize_session": False}
EVERY = timedelta(hours=6)
"""From the beginning of a whole comparison to that of the next."""

_log = structlog.get_logger("holdfast.tallies")


@dataclass
class Compared:
    """`rows` that were compared, `drifted` ones; `filled`: copies and lists that a migrated catalog had not counted
    yet."""

    rows: int = 0
    drifted: int = 0
    filled: int = 0


def compare(context: ServiceContext, compared: Compared, *, whole: bool = False) -> None:
    """One slice of each kind that is due; `whole`: all slices, now."""
    for slice_of in (_compare_copies, _compare_runs, _compare_lists):
        while slice_of(context, compared, now_due=whole) and not context.stopping.is_set():
            if not whole:
                break


KINDS = frozenset({"copies", "checkpoints", "lists"})


def resting_kinds(session: Session, now: datetime) -> set[str]:
    """Whose last comparison is over, and whose next is not due. One that began later than now did so by a clock that
    was ahead."""
    over = (TallyComparison.position.is_(None), TallyComparison.ended_at.is_not(None))
    lately = (TallyComparison.began_at > now - EVERY, TallyComparison.began_at <= now)
    return set(session.scalars(select(TallyComparison.kind).where(*over, *lately)))


def _begin(context: ServiceContext, kind: str, *, now_due: bool) -> TallyComparison | None:
    """None if none is due."""
    with context.database.read() as session:
        now = database_now(session)
        row = session.get(TallyComparison, kind)
        resting = kind in resting_kinds(session, now)
    if row is not None and row.position is not None:
        return row
    if resting and not now_due:
        return None
    with context.database.transaction() as session:
        insert_absent(session, TallyComparison, [{"kind": kind, "drifted": 0}])
        row = session.get_one(TallyComparison, kind)
        row.began_at, row.position = now, ""
        return row


def _move_on(session: Session, kind: str, position: str | None, drifted: int) -> None:
    values: dict[str, Any] = {"position": position, "drifted": TallyComparison.drifted + drifted}
    if position is None:
        values["ended_at"] = database_now(session)
    session.execute(
        update(TallyComparison).where(TallyComparison.kind == kind).values(values), execution_options=_UNSYNCHRONIZED
    )


def _compare_copies(context: ServiceContext, compared: Compared, *, now_due: bool) -> bool:
    """Whether there is another slice."""
    row = _begin(context, "copies", now_due=now_due)
    if row is None:
        return False
    after = int(row.position or 0)
    with context.database.read() as session:
        ids = session.execute(
            select(Copy.id, Copy.chunk_id).where(Copy.id > after).order_by(Copy.id).limit(BATCH)
        ).all()
    keeps = {each.chunk_id: True for each in ids}
    changed = context.database.run(lambda session: _put_right(session, keeps))
    if row.ended_at is None:
        compared.filled += changed
        changed = 0
    elif changed:
        _log.error("bytes_counted_wrongly", copies=changed, remedy="They are put right. Report it.")
    drifted = changed
    last = len(ids) < BATCH
    if last:
        drifted += _compare_sums(context)
    compared.rows += len(ids)
    compared.drifted += drifted
    with context.database.transaction() as session:
        _move_on(session, "copies", None if last else str(ids[-1].id), drifted)
    return not last


def _put_right(session: Session, keeps: dict[int, bool]) -> int:
    """How many copies had drifted. What is marked has not: it would have been counted anew. Marks are looked for in a
    later statement than the copies, because a change that was seen has left its mark by then. Nor has what a clock that
    was ahead has counted as kept no more."""
    done = recount(session, keeps)
    ended_early = set().union(*done.unmarked.values())
    unmarked = [chunk_id for chunk_id in done.changed if chunk_id not in ended_early]
    marked = _marked(session, unmarked) if unmarked else set()
    mark_ends(session, done.unmarked)
    return sum(chunk_id not in marked for chunk_id in unmarked)


def _marked(session: Session, chunk_ids: Collection[int]) -> set[int]:
    """The chunks of these that a mark names, or may name through its checkpoint."""
    due = is_due(database_now(session))
    if session.scalar(select(RecountMark.id).where(due, RecountMark.checkpoint_id.is_not(None)).limit(1)) is not None:
        return set(chunk_ids)
    marked = select(RecountMark.chunk_id).where(RecountMark.chunk_id.in_(chunk_ids))
    return {chunk_id for chunk_id in session.scalars(marked) if chunk_id is not None}


def _compare_sums(context: ServiceContext) -> int:
    """How many sums are not those of the copies. One snapshot: what is committed meanwhile is in neither side, and the
    difference can be added later."""
    found: Counter[tuple[Any, ...]] = Counter()
    sizes: Counter[tuple[Any, ...]] = Counter()
    with context.database.read(snapshot=True) as session:
        for copies, size, *key in _sums(session):
            found[tuple(key)] -= copies
            sizes[tuple(key)] -= size
        for copies, size, *key in _slices(session):
            found[tuple(key)] += copies
            sizes[tuple(key)] += size
    wrong = {key: (found[key], sizes[key]) for key in found if found[key] or sizes[key]}
    if wrong:
        _log.error("byte_sums_drifted", sums=len(wrong), remedy="They are put right. Report it.")
        with context.database.transaction() as session:
            add_deltas(session, wrong)
    return len(wrong)


def _sums(session: Session) -> Iterator[tuple[Any, ...]]:
    for table in (ByteTally, ByteDelta):
        rows = session.execute(
            select(
                func.sum(table.copies),
                func.sum(table.bytes),
                table.project_id,
                table.store_id,
                table.storage_class,
                table.counted,
            ).group_by(table.project_id, table.store_id, table.storage_class, table.counted)
        )
        yield from ((int(copies), int(size), *key) for copies, size, *key in rows)


def _slices(session: Session) -> Iterator[tuple[Any, ...]]:
    after = 0
    key = (Copy.project_id, Copy.store_id, func.coalesce(Copy.storage_class, ""), Copy.counted)
    while True:
        portion = select(Copy.id).where(Copy.id > after).order_by(Copy.id).limit(_COPIES_IN_A_SUM).subquery()
        last = session.scalar(select(func.max(portion.c.id)))
        if last is None:
            return
        rows = session.execute(
            select(func.count(), func.sum(Copy.stored_bytes), *key)
            .where(Copy.id > after, Copy.id <= last, Copy.state != CopyState.GONE)
            .group_by(*key)
        )
        yield from ((int(copies), int(size), *of) for copies, size, *of in rows)
        after = last


def _compare_runs(context: ServiceContext, compared: Compared, *, now_due: bool) -> bool:
    """Whether there is another slice."""
    row = _begin(context, "checkpoints", now_due=now_due)
    if row is None:
        return False
    with context.database.read(snapshot=True) as session:
        after = select(Run.id, Run.project_id).where(Run.id > (row.position or "")).order_by(Run.id).limit(_RUNS)
        runs = dict(session.execute(after).all())
        wrong = _wrong_runs(session, runs)
    drifted = _add(context, wrong)
    last = len(runs) < _RUNS
    if last:  # with what the runs lacked in them
        with context.database.read(snapshot=True) as session:
            wrong = _wrong_projects(session)
        drifted += _add(context, wrong)
    compared.rows += len(runs)
    compared.drifted += drifted
    with context.database.transaction() as session:
        _move_on(session, "checkpoints", None if last else max(runs), drifted)
    return not last


def _add(context: ServiceContext, wrong: _Wrong) -> int:
    """How many tallies had drifted, and have now what they lacked."""
    if wrong:
        _log.error("checkpoint_sums_drifted", sums=len(wrong), remedy="They are put right. Report it.")
        with context.database.transaction() as session:
            add_to_checkpoint_tallies(session, wrong)
    return len(wrong)


_Wrong = dict[tuple[str, str], list[int]]
"""By project and run: what a tally lacks."""


def _wrong_runs(session: Session, runs: Mapping[str, str]) -> _Wrong:
    rows = session.execute(
        select(Checkpoint.run_id, *_added_up()).where(Checkpoint.run_id.in_(runs)).group_by(Checkpoint.run_id)
    )
    found = {run_id: [int(value or 0) for value in values] for run_id, *values in rows}
    wrong: _Wrong = {}
    for project_id in sorted(set(runs.values())):
        mine = [run_id for run_id, owner in runs.items() if owner == project_id]
        for run_id, kept in sums_of_runs(session, project_id, mine).items():
            there = found.get(run_id, [0] * len(SUMMED))
            lacks = [value - getattr(kept, name) for name, value in zip(SUMMED, there, strict=True)]
            if any(lacks):
                wrong[project_id, run_id] = lacks
    return wrong


def _wrong_projects(session: Session) -> _Wrong:
    """Those whose tally is not that of their runs together; deltas go into both."""
    of_runs = case((CheckpointTally.run_id == "", -1), else_=1)
    sums = (func.sum(of_runs * getattr(CheckpointTally, name)) for name in SUMMED)
    rows = session.execute(select(CheckpointTally.project_id, *sums).group_by(CheckpointTally.project_id))
    lacking = {(project_id, ""): [int(value) for value in values] for project_id, *values in rows}
    return {key: lacks for key, lacks in lacking.items() if any(lacks)}


def _added_up() -> list[ColumnElement[int]]:
    """Over `checkpoints`, in the order of SUMMED."""
    committed, ever = Checkpoint.state == CheckpointState.COMMITTED, Checkpoint.committed_at.is_not(None)
    return [
        func.count().filter(Checkpoint.state == CheckpointState.UPLOADING),
        func.count().filter(committed),
        func.sum(Checkpoint.logical_bytes).filter(committed),
        func.sum(Checkpoint.deduplicated_bytes).filter(committed),
        func.count(Checkpoint.committed_at),
        func.count(Checkpoint.aborted_at),
        func.sum(Checkpoint.chunk_bytes).filter(ever),
        func.sum(Checkpoint.uploaded_bytes).filter(ever),
        func.sum(Checkpoint.deduplicated_bytes).filter(ever),
    ]


def _compare_lists(context: ServiceContext, compared: Compared, *, now_due: bool) -> bool:
    """Whether there is another slice."""
    row = _begin(context, "lists", now_due=now_due)
    if row is None:
        return False
    after = select(ChunkList.id).where(ChunkList.id > int(row.position or 0)).order_by(ChunkList.id).limit(BATCH)
    with context.database.read() as session:
        ids = session.scalars(after).all()
    compared.filled += context.database.run(lambda session: _count_entries(session, ids))
    last = len(ids) < BATCH
    drifted = _compare_entries(context) if last else 0
    compared.rows += len(ids)
    compared.drifted += drifted
    with context.database.transaction() as session:
        _move_on(session, "lists", None if last else str(ids[-1]), drifted)
    return not last


def _count_entries(session: Session, list_ids: Collection[int]) -> int:
    """Of how many of these lists they were not known. In the order in which all lock lists."""
    unknown = select(ChunkList.id).where(ChunkList.id.in_(list_ids), ChunkList.entries.is_(None))
    locked = session.scalars(unknown.order_by(ChunkList.id).with_for_update(key_share=True)).all()
    if locked:
        entries = select(func.count()).where(ChunkListEntry.chunk_list_id == ChunkList.id).scalar_subquery()
        counted = update(ChunkList).where(ChunkList.id.in_(locked)).values(entries=entries)
        session.execute(counted, execution_options=_UNSYNCHRONIZED)
    return len(locked)


def _compare_entries(context: ServiceContext) -> int:
    """How many projects have another sum than their lists. One snapshot, as of the copies."""
    lacking: Counter[str] = Counter()
    with context.database.read(snapshot=True) as session:
        for table, sign in ((ChunkList, 1), (ListTally, -1), (ListDelta, -1)):
            of_projects = select(table.project_id, func.sum(table.entries)).group_by(table.project_id)
            for project_id, entries in session.execute(of_projects):
                lacking[project_id] += sign * int(entries or 0)
    wrong = [{"project_id": project_id, "entries": lacks} for project_id, lacks in lacking.items() if lacks]
    if wrong:
        _log.error("list_sums_drifted", sums=len(wrong), remedy="They are put right. Report it.")
        with context.database.transaction() as session:
            session.execute(insert(ListDelta), wrong)
    return len(wrong)
