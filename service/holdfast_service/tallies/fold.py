"""Adds deltas to the tallies. A transaction takes a portion of the deltas out and adds it: whoever reads sees it in one
place, and a process that dies in here has done nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, delete, select, update
from sqlalchemy.orm import Session

from holdfast_service.context import ServiceContext
from holdfast_service.db.dialect import insert_absent
from holdfast_service.db.tables.tallies import (
    ByteDelta,
    ByteTally,
    CheckpointDelta,
    CheckpointTally,
    ListDelta,
    ListTally,
)
from holdfast_service.tallies.sums import SUMMED

_AT_ONCE = 5000
_UNSYNCHRONIZED = {"synchronize_session": False}


def fold(context: ServiceContext) -> int:
    """How many deltas were added."""
    folded = 0
    for portion in (_fold_checkpoints, _fold_bytes, _fold_lists):
        while not context.stopping.is_set():
            taken = context.database.run(portion)
            folded += taken
            if taken < _AT_ONCE:
                break
    return folded


def _fold_checkpoints(session: Session) -> int:
    taken = _take(session, CheckpointDelta)
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(SUMMED))
    for row in taken:
        for run_id in (row.run_id, ""):
            sum_of = sums[row.project_id, run_id]
            for at, name in enumerate(SUMMED):
                sum_of[at] += getattr(row, name)
    add_to_checkpoint_tallies(session, sums)
    return len(taken)


def add_to_checkpoint_tallies(session: Session, sums: Mapping[tuple[str, str], Sequence[int]]) -> None:
    """By project and run: what is added to each column, in the order of SUMMED. An empty run is the project."""
    _add(session, CheckpointTally, ("project_id", "run_id"), SUMMED, sums)


def _fold_bytes(session: Session) -> int:
    taken = _take(session, ByteDelta)
    sums: defaultdict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    for row in taken:
        sum_of = sums[row.project_id, row.store_id, row.storage_class, row.counted]
        sum_of[0] += row.copies
        sum_of[1] += row.bytes
    _add(session, ByteTally, ("project_id", "store_id", "storage_class", "counted"), ("copies", "bytes"), sums)
    return len(taken)


def _fold_lists(session: Session) -> int:
    taken = _take(session, ListDelta)
    sums: defaultdict[tuple[str], list[int]] = defaultdict(lambda: [0])
    for row in taken:
        sums[row.project_id,][0] += row.entries
    _add(session, ListTally, ("project_id",), ("entries",), sums)
    return len(taken)


def _take(session: Session, table: type[CheckpointDelta | ByteDelta | ListDelta]) -> list[Any]:
    """The oldest ones, which are gone when this transaction commits. What another process takes is left to it."""
    portion = select(*table.__table__.c).order_by(table.id).limit(_AT_ONCE).with_for_update(skip_locked=True)
    taken = session.execute(portion).all()
    if taken:
        ids = [row.id for row in taken]
        session.execute(delete(table).where(table.id.in_(ids)), execution_options=_UNSYNCHRONIZED)
    return list(taken)


def _add(
    session: Session,
    table: type[CheckpointTally | ByteTally | ListTally],
    key: tuple[str, ...],
    summed: tuple[str, ...],
    sums: Mapping[Any, Sequence[int]],
) -> None:
    """In the order of the keys, so that two processes never wait for each other in a circle."""
    changed = [(of, values) for of, values in sorted(sums.items()) if any(values)]
    if not changed:
        return
    insert_absent(session, table, [dict(zip(key, of, strict=True)) for of, _ in changed])
    mine = [getattr(table, name) == bindparam(f"of_{name}") for name in key]
    more = {name: getattr(table, name) + bindparam(f"more_{name}") for name in summed}
    names = [*(f"of_{name}" for name in key), *(f"more_{name}" for name in summed)]
    rows = [dict(zip(names, (*of, *values), strict=True)) for of, values in changed]
    session.connection().execute(update(table).where(*mine).values(more), rows)
