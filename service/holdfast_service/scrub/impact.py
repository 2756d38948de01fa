"""What a bad chunk means: its copies, who needs it, what is lost, and everything that is bad in a project."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.base import Page
from holdfast_protocol.copies import AffectedCheckpoint, AffectedRun, BadCopy, ChunkImpact, CopyView, GoodStep, Impact
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState, CopyState, Health, Proof
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import KEPT, keeps_whole
from holdfast_service.db.pages import cut_page, decode_cursor
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkListEntry, Copy, Project, Run, Shard
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.restore_choice import line_of_run
from holdfast_service.runs.views import WHOLE, checkpoint_by_id, project_named


def is_bad() -> ColumnElement[bool]:
    """Over `copies`: suspect, or found bad and not repaired. An upload that never arrived as announced is neither."""
    return or_(
        Copy.state == CopyState.SUSPECT,
        and_(Copy.state == CopyState.BAD, Copy.bad_at.is_not(None), Copy.repaired_at.is_(None)),
    )


def is_kept(store_ids: Collection[int]) -> ColumnElement[bool]:
    """Over `chunks`: an attached store has a copy that is not known to be bad."""
    kept = aliased(Copy)
    return exists().where(kept.chunk_id == Chunk.id, kept.store_id.in_(store_ids), kept.state.in_(KEPT))


def view_of(context: ServiceContext, copy: Copy) -> CopyView:
    return CopyView(**copy_fields(context, copy))


def copy_fields(context: ServiceContext, copy: Copy) -> dict[str, Any]:
    role = next((attached.role for attached in context.stores if attached.store_id == copy.store_id), None)
    return {
        "store": role,
        "state": CopyState(copy.state),
        "proof": None if copy.proof is None else Proof(copy.proof),
        "codec": copy.codec,
        "stored_bytes": copy.stored_bytes,
        "storage_class": copy.storage_class,
        "verified_at": copy.verified_at,
        "bad_at": copy.bad_at,
        "finding": copy.finding,
        "repaired_at": copy.repaired_at,
    }


def copies_by_chunk(session: Session, context: ServiceContext, chunk_ids: Collection[int]) -> dict[int, list[CopyView]]:
    """What is gone is left out."""
    found: dict[int, list[CopyView]] = {chunk_id: [] for chunk_id in chunk_ids}
    for copy in session.scalars(
        select(Copy).where(Copy.chunk_id.in_(chunk_ids), Copy.state != CopyState.GONE).order_by(Copy.id)
    ):
        found[copy.chunk_id].append(view_of(context, copy))
    return found


SHOWN_CHECKPOINTS = 500
_SHOWN_CHUNKS = 500


def impact_of_chunk(context: ServiceContext, caller: Principal, digest: str) -> Impact:
    """Over the projects that the caller sees. Raises `chunk_not_found`."""
    with context.database.read() as session:
        query = select(Chunk).where(Chunk.digest == digest)
        if caller.project_id is not None:
            query = query.where(Chunk.project_id == caller.project_id)
        chunks = session.scalars(query.order_by(Chunk.id)).all()
        if not chunks:
            raise ProblemError(
                ProblemCode.CHUNK_NOT_FOUND,
                f"No project that this token sees has a chunk {digest}. Correct the digest.",
                digest=digest,
            )
        return _impact(session, context, chunks)


def impact_of_checkpoint(context: ServiceContext, caller: Principal, checkpoint_id: str) -> Impact:
    """The impact of its chunks that have a bad or suspect copy which is not repaired, or no good one; nothing if there
    are none. What is lost comes first: with more bad chunks than are shown it would else look whole. Raises
    `checkpoint_not_found`."""
    with context.database.read() as session:
        _, _, checkpoint = checkpoint_by_id(session, caller, checkpoint_id)
        lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
        entries = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
        bad = exists().where(Copy.chunk_id == Chunk.id, is_bad())
        whole = exists().where(Copy.chunk_id == Chunk.id, keeps_whole(context.store_ids, checkpoint.attempt_id))
        concerned = (Chunk.id.in_(entries), or_(bad, ~whole))
        first = whole.label("whole")
        chunks = session.scalars(
            select(Chunk, first).where(*concerned).order_by(first, Chunk.id).limit(_SHOWN_CHUNKS)
        ).all()
        left_off = 0
        if len(chunks) == _SHOWN_CHUNKS:
            left_off = (session.scalar(select(func.count()).select_from(Chunk).where(*concerned)) or 0) - len(chunks)
        return _impact(session, context, chunks, chunks_left_off=max(0, left_off))


def _impact(session: Session, context: ServiceContext, chunks: Sequence[Chunk], *, chunks_left_off: int = 0) -> Impact:
    chunk_ids = [chunk.id for chunk in chunks]
    projects = dict(session.execute(select(Project.id, Project.name)).all())
    copies = copies_by_chunk(session, context, chunk_ids)
    runs = _runs(session, context, chunk_ids)
    lost_ids = _lost(session, context, chunk_ids)
    good = {run.id: _good_steps(session, run.id, lost_ids) for run, *_ in runs}
    rows = _checkpoints(session, context, chunk_ids)
    concerned = sum(count for _, count, *_ in runs)
    return Impact(
        chunks=[
            ChunkImpact(
                project=projects[chunk.project_id],
                digest=chunk.digest,
                bytes=chunk.bytes,
                copies=copies[chunk.id],
                lost=not any(copy.store is not None and copy.state in KEPT for copy in copies[chunk.id]),
            )
            for chunk in chunks
        ],
        runs=[
            AffectedRun(
                project=projects[run.project_id],
                run=run.name,
                checkpoints=count,
                lost_checkpoints=lost,
                good_before=_before(good[run.id], first),
                good_after=_after(good[run.id], last),
            )
            for run, count, lost, first, last in runs
        ],
        checkpoints=[
            AffectedCheckpoint(
                checkpoint_id=row.id,
                project=projects[run.project_id],
                run=run.name,
                step=row.step,
                attempt=row.attempt_number,
                state=CheckpointState(row.state),
                health=Health(row.health),
                lost=bool(lost),
                good_before=_before(good[run.id], row.step),
                good_after=_after(good[run.id], row.step),
            )
            for row, run, lost in rows
        ],
        left_off=max(0, concerned - len(rows)),
        chunks_left_off=chunks_left_off,
        lost=any(lost for _, _, lost, *_ in runs),
    )


def _concerned(chunk_ids: Collection[int]) -> ColumnElement[bool]:
    needing = (
        select(Shard.checkpoint_id)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .where(ChunkListEntry.chunk_id.in_(chunk_ids))
    )
    return and_(Checkpoint.id.in_(needing), Checkpoint.state.in_(WHOLE))


def _is_lost(context: ServiceContext, chunk_ids: Collection[int]) -> ColumnElement[bool]:
    """Over `checkpoints`: it needs one of these chunks and can rely on no copy of it, in any attached store."""
    kept = (
        exists()
        .where(Copy.chunk_id == ChunkListEntry.chunk_id, keeps_whole(context.store_ids, Checkpoint.attempt_id))
        .correlate(ChunkListEntry, Checkpoint)  # else its checkpoint would be any that there is
    )
    return exists().where(
        Shard.checkpoint_id == Checkpoint.id,
        ChunkListEntry.chunk_list_id == Shard.chunk_list_id,
        ChunkListEntry.chunk_id.in_(chunk_ids),
        ~kept,
    )


def _lost(session: Session, context: ServiceContext, chunk_ids: Collection[int]) -> set[str]:
    """The ids of those that are lost, also where no process has marked them yet."""
    lost = select(Checkpoint.id).where(_concerned(chunk_ids), _is_lost(context, chunk_ids))
    return set(session.scalars(lost))


def _runs(
    session: Session, context: ServiceContext, chunk_ids: Collection[int]
) -> Sequence[tuple[Run, int, int, int, int]]:
    """Each with how many checkpoints are concerned, how many of them are lost, and the first and the last step."""
    counted = (
        select(
            Checkpoint.run_id,
            func.count().label("checkpoints"),
            func.sum(case((_is_lost(context, chunk_ids), 1), else_=0)).label("lost"),
            func.min(Checkpoint.step).label("first"),
            func.max(Checkpoint.step).label("last"),
        )
        .where(_concerned(chunk_ids))
        .group_by(Checkpoint.run_id)
        .subquery()
    )
    rows = session.execute(
        select(Run, counted.c.checkpoints, counted.c.lost, counted.c.first, counted.c.last)
        .join(counted, counted.c.run_id == Run.id)
        .order_by(Run.name, Run.id)
    )
    return [(run, int(count), int(lost), int(first), int(last)) for run, count, lost, first, last in rows]


def _checkpoints(
    session: Session, context: ServiceContext, chunk_ids: Collection[int]
) -> Sequence[tuple[Checkpoint, Run, bool]]:
    rows = session.execute(
        select(Checkpoint, Run, _is_lost(context, chunk_ids).label("lost"))
        .join(Run, Run.id == Checkpoint.run_id)
        .where(_concerned(chunk_ids))
        .order_by(Run.name, Run.id, Checkpoint.step.desc(), Checkpoint.attempt_number.desc(), Checkpoint.id)
        .limit(SHOWN_CHECKPOINTS)
    )
    return [(row.Checkpoint, row.Run, bool(row.lost)) for row in rows]


def _good_steps(session: Session, run_id: str, lost_ids: Collection[str]) -> list[GoodStep]:
    """What can be restored on the run's lineage, the smallest step first: none of `lost_ids`."""
    line = line_of_run(session, run_id)
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.step, Checkpoint.attempt_number, Checkpoint.detached)
        .where(
            Checkpoint.run_id == run_id,
            Checkpoint.state == CheckpointState.COMMITTED,
            Checkpoint.health == Health.OK,
        )
        .order_by(Checkpoint.step, Checkpoint.attempt_number)
    )
    return [
        GoodStep(checkpoint_id=checkpoint_id, step=step, attempt=attempt)
        for checkpoint_id, step, attempt, detached in rows
        if line.has(checkpoint_id, attempt, step, detached=detached) and checkpoint_id not in lost_ids
    ]


def _before(good: Sequence[GoodStep], step: int) -> GoodStep | None:
    position = bisect_left(good, step, key=lambda one: one.step)
    return good[position - 1] if position else None


def _after(good: Sequence[GoodStep], step: int) -> GoodStep | None:
    position = bisect_right(good, step, key=lambda one: one.step)
    return good[position] if position < len(good) else None


_CURSOR = "bad-copies"


def list_bad_copies(
    context: ServiceContext, caller: Principal, project: str, *, cursor: str | None, limit: int
) -> Page[BadCopy]:
    """Everything that is bad or suspect in a project: a page of copies, those found first at the top. Raises
    `forbidden` and `project_not_found`."""
    needing = (
        select(func.count(Checkpoint.id.distinct()))
        .join(Shard, Shard.checkpoint_id == Checkpoint.id)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .where(ChunkListEntry.chunk_id == Copy.chunk_id, Checkpoint.state.in_(WHOLE))
        .correlate(Copy)
        .scalar_subquery()
    )
    query = select(Copy, Chunk, is_kept(context.store_ids).label("kept"), needing.label("checkpoints"))
    query = query.join(Chunk, Chunk.id == Copy.chunk_id).where(is_bad()).order_by(Copy.id).limit(limit + 1)
    if cursor is not None:
        (after,) = decode_cursor(_CURSOR, cursor, int)
        query = query.where(Copy.id > after)
    with context.database.read() as session:
        owner = project_named(session, caller, project)
        found = session.execute(query.where(Copy.project_id == owner.id)).all()
        rows, next_cursor = cut_page(_CURSOR, found, limit, lambda row: (row.Copy.id,))
        return Page(
            items=[
                BadCopy(
                    **copy_fields(context, row.Copy),
                    project=owner.name,
                    digest=row.Chunk.digest,
                    bytes=row.Chunk.bytes,
                    lost=not row.kept,
                    checkpoints=row.checkpoints,
                )
                for row in rows
            ],
            next_cursor=next_cursor,
        )
