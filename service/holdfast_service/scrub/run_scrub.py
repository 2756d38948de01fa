"""The operation behind `holdfast scrub`: reads every copy of a run's or a checkpoint's chunks, and heals what is bad.

    the chunks, a portion at a time: read or look at each copy (scrub_chunks.py), then mend what is damaged
      -> take back the marks of what is whole again -> the result

It may be begun again at any point: what was read since the operation was asked for is not read again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_protocol.scrub import ScrubMode, ScrubResult
from holdfast_protocol.states import Health
from holdfast_service.catalog.copies import KEPT
from holdfast_service.catalog.copying import StoreFailedError
from holdfast_service.catalog.custody_tables import Operation
from holdfast_service.catalog.operation_run import OperationRun
from holdfast_service.catalog.readable import WHOLE
from holdfast_service.catalog.tables import Checkpoint, ChunkListEntry, Copy, Project, Run, Shard
from holdfast_service.context import ServiceContext
from holdfast_service.scrub.heal import unmark
from holdfast_service.scrub.scrub_chunks import ChunkScrub
from holdfast_service.scrub.tally import keep_totals, total_of

_PORTION = 200


def run_scrub(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    """A ScrubResult. What a store does not answer is told in it, and fails nothing."""
    mode = ScrubMode(run.arguments["mode"])
    with context.database.read() as session:
        since = session.execute(select(Operation.created_at).where(Operation.id == run.id)).scalar_one()
        checkpoint_ids = _checkpoints(session, run)
        chunk_ids = _chunks(session, checkpoint_ids)
    scrub = ChunkScrub(context, run.actor, mode, since)
    try:
        for first in range(0, len(chunk_ids), _PORTION):
            run.progress(done=first, total=len(chunk_ids), note="chunks")
            scrub.portion(chunk_ids[first : first + _PORTION], run.progress)
        run.progress(done=len(chunk_ids), total=len(chunk_ids), note="chunks")
        scrub.wait_for_the_rest(run.progress)
        for checkpoint_id in _corrupt(context, checkpoint_ids | scrub.marked):
            run.progress(note="takes back marks")
            try:
                unmark(context, checkpoint_id, scrub.by_store)
            except StoreFailedError as error:
                scrub.note_problem(error.store_id, error)
    finally:
        keep_totals(context.database, scrub.by_store)
    result = ScrubResult(
        mode=mode,
        copies=scrub.copies,
        good=scrub.good,
        bad=scrub.bad,
        missing=scrub.missing,
        read_bytes=total_of(scrub.by_store).read_bytes,
        healed=_count_healed(context, chunk_ids, since),
        lost=_count_lost(context, chunk_ids),
        cold=scrub.cold,
        unread=scrub.unread,
        problems=scrub.problems,
        marked=_names(context, _corrupt(context, checkpoint_ids | scrub.marked)),
    )
    return result.model_dump(mode="json")


def _checkpoints(session: Session, run: OperationRun) -> set[str]:
    if run.checkpoint_id is not None:
        return {run.checkpoint_id}
    return set(
        session.scalars(select(Checkpoint.id).where(Checkpoint.run_id == run.run_id, Checkpoint.state.in_(WHOLE)))
    )


def _chunks(session: Session, checkpoint_ids: Collection[str]) -> list[int]:
    """Each once, however many checkpoints share it."""
    found: set[int] = set()
    for portion in _portions(sorted(checkpoint_ids)):
        lists = select(Shard.chunk_list_id).where(Shard.checkpoint_id.in_(portion))
        found.update(
            session.scalars(select(ChunkListEntry.chunk_id).where(ChunkListEntry.chunk_list_id.in_(lists)).distinct())
        )
    return sorted(found)


def _corrupt(context: ServiceContext, checkpoint_ids: Collection[str]) -> list[str]:
    found: list[str] = []
    with context.database.read() as session:
        for portion in _portions(sorted(checkpoint_ids)):
            found += session.scalars(
                select(Checkpoint.id).where(Checkpoint.id.in_(portion), Checkpoint.health == Health.CORRUPT)
            )
    return found


def _names(context: ServiceContext, checkpoint_ids: Sequence[str]) -> list[str]:
    names: list[str] = []
    with context.database.read() as session:
        for portion in _portions(checkpoint_ids):
            rows = session.execute(
                select(Project.name, Run.name, Checkpoint.step, Checkpoint.attempt_number)
                .join(Run, Run.project_id == Project.id)
                .join(Checkpoint, Checkpoint.run_id == Run.id)
                .where(Checkpoint.id.in_(portion))
                .order_by(Run.name, Checkpoint.step, Checkpoint.attempt_number)
            )
            names += [f"{project}/{run}@{step}#{attempt}" for project, run, step, attempt in rows]
    return names


def _count_healed(context: ServiceContext, chunk_ids: Sequence[int], since: datetime) -> int:
    healed = 0
    with context.database.read() as session:
        for portion in _portions(chunk_ids):
            healed += (
                session.scalar(select(func.count()).where(Copy.chunk_id.in_(portion), Copy.healed_at >= since)) or 0
            )
    return healed


def _count_lost(context: ServiceContext, chunk_ids: Sequence[int]) -> int:
    kept = 0
    with context.database.read() as session:
        for portion in _portions(chunk_ids):
            kept += (
                session.scalar(
                    select(func.count(Copy.chunk_id.distinct())).where(
                        Copy.chunk_id.in_(portion), Copy.store_id.in_(context.store_ids), Copy.state.in_(KEPT)
                    )
                )
                or 0
            )
    return len(chunk_ids) - kept


def _portions(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[first : first + _PORTION] for first in range(0, len(items), _PORTION)]
