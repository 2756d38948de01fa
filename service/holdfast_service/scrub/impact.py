"""What a bad chunk means: its copies, who needs it (checkpoints and runs), what is lost, and the nearest good steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, and_, case, exists, func, or_, select
from sqlalchemy.orm import Session

from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.scrub import AffectedCheckpoint, AffectedRun, ChunkImpact, GoodStep, Impact
from holdfast_protocol.states import CheckpointState, Health
from holdfast_service.auth.principal import Principal
from holdfast_service.catalog.copies import KEPT, keeps_whole
from holdfast_service.catalog.readable import WHOLE
from holdfast_service.catalog.resolve import checkpoint_by_id
from holdfast_service.catalog.restore_choice import line_of_run
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkListEntry, Copy, Project, Run, Shard
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.scrub.copy_views import copies_by_chunk, is_bad, is_kept

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
    """Of its chunks that have a bad or suspect copy which is not healed, or no good one; nothing if there are none.
    Raises `checkpoint_not_found`."""
    with context.database.read() as session:
        checkpoint_by_id(session, caller, checkpoint_id)
        lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id == checkpoint_id)
        entries = select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists))
        bad = exists().where(Copy.chunk_id == Chunk.id, is_bad())
        chunks = session.scalars(
            select(Chunk)
            .where(Chunk.id.in_(entries), or_(bad, ~is_kept(context.store_ids)))
            .order_by(Chunk.id)
            .limit(_SHOWN_CHUNKS)
        ).all()
        return _impact(session, context, chunks)


def _impact(session: Session, context: ServiceContext, chunks: Sequence[Chunk]) -> Impact:
    chunk_ids = [chunk.id for chunk in chunks]
    projects = dict(session.execute(select(Project.id, Project.name)).all())
    copies = copies_by_chunk(session, context, chunk_ids)
    runs = _runs(session, context, chunk_ids)
    good = {run.id: _good_steps(session, run.id) for run, *_ in runs}
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
    kept = exists().where(
        Copy.chunk_id == ChunkListEntry.chunk_id, keeps_whole(context.store_ids, Checkpoint.attempt_id)
    )
    return exists().where(
        Shard.checkpoint_id == Checkpoint.id,
        ChunkListEntry.chunk_list_id == Shard.chunk_list_id,
        ChunkListEntry.chunk_id.in_(chunk_ids),
        ~kept,
    )


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


def _good_steps(session: Session, run_id: str) -> list[GoodStep]:
    """What can be restored on the run's line of descent, the smallest step first."""
    line = line_of_run(session, run_id)
    rows = session.execute(
        select(Checkpoint.id, Checkpoint.step, Checkpoint.attempt_number)
        .where(
            Checkpoint.run_id == run_id,
            Checkpoint.state == CheckpointState.COMMITTED,
            Checkpoint.health == Health.OK,
            ~Checkpoint.off_line,
        )
        .order_by(Checkpoint.step, Checkpoint.attempt_number)
    )
    return [
        GoodStep(checkpoint_id=checkpoint_id, step=step, attempt=attempt)
        for checkpoint_id, step, attempt in rows
        if (attempt, step) in line
    ]


def _before(good: Sequence[GoodStep], step: int) -> GoodStep | None:
    position = bisect_left(good, step, key=lambda one: one.step)
    return good[position - 1] if position else None


def _after(good: Sequence[GoodStep], step: int) -> GoodStep | None:
    position = bisect_right(good, step, key=lambda one: one.step)
    return good[position] if position < len(good) else None
