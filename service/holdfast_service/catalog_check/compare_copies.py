"""Rows against objects in one store. The listing is read once; rows are ticked off in a bitmap, as there may be tens
of millions. What is missing or has another size is asked for by itself, under a lease, before anything is marked: the
collector may have been at it meanwhile, and a store that is not ours proves nothing (rule report-is-suspicion).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import func, select, text, tuple_

from holdfast_protocol.states import CopyState
from holdfast_protocol.stores import FindingKind
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.audit.record import Actor
from holdfast_service.catalog_check.findings import Findings
from holdfast_service.context import ServiceContext
from holdfast_service.copies.cold import note_archived
from holdfast_service.copies.read_back import (
    READABLE,
    Claim,
    Finding,
    claim_bad,
    claim_first,
    copy_is_free,
    found_bad,
    let_go,
    look_again,
    read_back,
    refuse_emptied_store,
    refuse_wrong_store,
    settle,
)
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import COPY_DAMAGED, Chunk, Copy, Project
from holdfast_service.stores.base import ObjectArchived, ObjectMissing, StoredObject, StoreError

_BATCH = 500
_LEASE_SECONDS = 600
# States of a copy that say that the store has its object, whole.
_THERE = (CopyState.VERIFIED, CopyState.SUSPECT, CopyState.COLD, CopyState.THAWING)
_KINDS = {Finding.MISSING: FindingKind.MISSING_OBJECTS, Finding.WRONG_SIZE: FindingKind.WRONG_SIZES}


@dataclass
class CopiesReport:
    objects: int = 0
    object_bytes: int = 0
    copies: int = 0
    read_copies: int = 0


@dataclass(frozen=True)
class CopyCheck:
    """What the steps share. `on_step` is told how many objects and rows were looked at, between two transactions.
    `confirm_missing`: a person says that what is missing is gone, however much it is."""

    context: ServiceContext
    attached: AttachedStore
    findings: Findings
    actor: Actor
    on_step: Callable[[int], None]
    confirm_missing: bool = False


def compare_copies(check: CopyCheck, *, deep: bool) -> CopiesReport:
    """Raises StoreError: a listing that is not whole would make objects look missing."""
    report = CopiesReport()
    with check.context.database.read() as session:
        newest = session.scalar(select(func.max(Copy.id)).where(Copy.store_id == check.attached.store_id)) or 0
        projects = session.scalars(select(Project.id).order_by(Project.id)).all()
    seen = bytearray(newest // 8 + 1)
    for project_id in projects:
        objects = check.attached.store.list_objects(project_id)
        while batch := list(islice(objects, _BATCH)):
            _tick_off(check, project_id, batch, seen, report)
            check.on_step(len(batch))
    for copy_id, size in _rows(check, newest, report):
        if not seen[copy_id // 8] & 1 << copy_id % 8:
            # Each asks the store: a thousand of them outlast the lease of an operation that says nothing.
            check.on_step(0)
            _look_again(check, copy_id, size)
        elif deep:
            report.read_copies += _read(check, copy_id, size)
    for copy_id in _bad_ones(check, newest):
        if seen[copy_id // 8] & 1 << copy_id % 8:
            report.read_copies += _look_at_bad(check, copy_id)
    return report


def _tick_off(
    check: CopyCheck, project_id: str, batch: Sequence[StoredObject], seen: bytearray, report: CopiesReport
) -> None:
    """Objects that a row speaks of and that have its size; the rest stays to be asked for."""
    keys = [(each.key.digest, each.key.generation) for each in batch]
    with check.context.database.read() as session:
        rows = {
            (row.digest, row.generation): row
            for row in session.execute(
                select(Copy.id, Copy.generation, Copy.stored_bytes, Chunk.digest)
                .join(Chunk, Chunk.id == Copy.chunk_id)
                .where(
                    Copy.store_id == check.attached.store_id,
                    Chunk.project_id == project_id,
                    tuple_(Chunk.digest, Copy.generation).in_(keys),
                )
            )
        }
    for each in batch:
        report.objects += 1
        report.object_bytes += each.bytes
        row = rows.get((each.key.digest, each.key.generation))
        if row is None:
            check.findings.add(FindingKind.UNKNOWN_OBJECTS, each.key.path, each.bytes)
        elif row.stored_bytes == each.bytes and row.id // 8 < len(seen):
            seen[row.id // 8] |= 1 << row.id % 8


def _rows(check: CopyCheck, newest: int, report: CopiesReport) -> Iterator[tuple[int, int]]:
    """Id and size of each copy that was there when the listing began and still should be."""
    last = 0
    while True:
        with check.context.database.read() as session:
            rows = session.execute(
                select(Copy.id, Copy.stored_bytes)
                .where(
                    Copy.store_id == check.attached.store_id, Copy.state.in_(_THERE), Copy.id > last, Copy.id <= newest
                )
                .order_by(Copy.id)
                .limit(_BATCH)
            ).all()
        for copy_id, size in rows:
            report.copies += 1
            yield copy_id, size
        if len(rows) < _BATCH:
            return
        last = rows[-1].id
        check.on_step(0)


def _bad_ones(check: CopyCheck, newest: int) -> Iterator[int]:
    last = 0
    while True:
        with check.context.database.read() as session:
            ids = session.scalars(
                select(Copy.id)
                .where(
                    text(f"({COPY_DAMAGED})"),
                    found_bad(),
                    Copy.store_id == check.attached.store_id,
                    Copy.id > last,
                    Copy.id <= newest,
                )
                .order_by(Copy.id)
                .limit(_BATCH)
            ).all()
        yield from ids
        if len(ids) < _BATCH:
            return
        last = ids[-1]


def _look_at_bad(check: CopyCheck, copy_id: int) -> int:
    """Whether it was read: it was found bad, and its object is there with the right size."""
    claimed = check.context.database.run(lambda session: claim_bad(session, check.context, copy_id))
    finding = None if claimed is None else look_again(check.context, claimed, check.actor)
    check.on_step(1)
    return int(finding is not None)


def _look_again(check: CopyCheck, copy_id: int, size: int) -> None:
    claimed = _claim(check, copy_id, _THERE)
    if claimed is None:
        return
    try:
        finding = _ask(check, claimed)
    except StoreError:
        let_go(check.context, claimed)
        raise
    if finding is None:
        let_go(check.context, claimed)
        return
    settle(check.context, claimed, finding, check.actor)
    check.findings.add(_KINDS[finding], claimed.key.path, size)


def _ask(check: CopyCheck, claimed: Claim) -> Finding | None:
    finding = _head(check, claimed)
    if finding is None:
        return None
    refuse_wrong_store(check.context, check.attached.store)
    if finding is Finding.MISSING and not check.confirm_missing:
        refuse_emptied_store(check.context, check.attached.store, claimed)
    # A miss is confirmed, now that the store was seen to be whole.
    return _head(check, claimed)


def _head(check: CopyCheck, claimed: Claim) -> Finding | None:
    try:
        facts = check.attached.store.head(claimed.key)
    except ObjectMissing:
        return Finding.MISSING
    return None if facts.bytes == claimed.stored_bytes else Finding.WRONG_SIZE


def _read(check: CopyCheck, copy_id: int, size: int) -> int:
    """Whether it was read: not what another process reads now, and nothing that must be thawed first."""
    claimed = _claim(check, copy_id, READABLE)
    if claimed is None:
        return 0
    try:
        finding = _read_or_note(check, claimed)
    except StoreError:
        let_go(check.context, claimed)
        raise
    if finding is None:
        return 0
    settle(check.context, claimed, finding, check.actor)
    if finding is not Finding.GOOD:
        check.findings.add(FindingKind.DAMAGED_COPIES, claimed.key.path, size)
    check.on_step(1)
    return 1


def _read_or_note(check: CopyCheck, claimed: Claim) -> Finding | None:
    """None: it must be thawed first, which its row says now."""
    try:
        return read_back(check.context, claimed)
    except ObjectArchived:
        return note_archived(check.context, claimed, check.actor)


def _claim(check: CopyCheck, copy_id: int, states: Sequence[CopyState]) -> Claim | None:
    """The lease is enough: a cold copy stays cold until something is found. None if it changed meanwhile, or another
    process works on it."""
    with check.context.database.transaction() as session:
        free = copy_is_free(database_now(session))
        return claim_first(session, Copy.id == copy_id, Copy.state.in_(states), free, seconds=_LEASE_SECONDS)
