"""The last steps: what the lineage needs, what is missing is marked, and the catalog may be served.

Only the very last transaction lets a service open the catalog; until then all of it can be done again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import and_, delete, exists, func, join, or_, select, update
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.states import CheckpointKind, CheckpointState, CopyState, Health, Tier
from holdfast_protocol.text import counted
from holdfast_protocol.tiers import coldness
from holdfast_service.audit.record import Actor, record_event
from holdfast_service.copies.corruption import corrupt_reason
from holdfast_service.db.dialect import database_now, insert_absent
from holdfast_service.db.engine import Database
from holdfast_service.db.tables.core import (
    Attempt,
    CatalogIdentity,
    Checkpoint,
    Chunk,
    ChunkListEntry,
    Copy,
    Project,
    Run,
    Shard,
)
from holdfast_service.db.tables.operations import Hold
from holdfast_service.db.tables.records import FoundEncoding
from holdfast_service.holds.held import is_held
from holdfast_service.lineage.restore_choice import EVERY
from holdfast_service.rebuild.begin import refuse_unless_rebuilding
from holdfast_service.rebuild.endpoints import put_doubts
from holdfast_service.rebuild.report import RebuildReport
from holdfast_service.records.documents import AttemptFacts, RecordKind
from holdfast_service.records.outbox import subject_changed

TIME_TO_LOOK = timedelta(days=3)
_THERE = (CopyState.SUSPECT, CopyState.VERIFIED, CopyState.COLD, CopyState.THAWING)


@dataclass(frozen=True)
class Parent:
    """A checkpoint that an attempt resumed from. It may have been purged, and the line leads through it all the
    same."""

    run_id: str
    facts: AttemptFacts


def stand_in_for_purged(database: Database, parents: Iterable[Parent]) -> None:
    """A row, `deleted`, for each that has none: only its attempt and step count."""
    for parent in parents:
        facts = parent.facts
        with database.transaction() as session:
            refuse_unless_rebuilding(session)
            there = session.scalar(select(exists().where(Checkpoint.id == facts.resumed_from_id)))
            attempt = session.scalar(
                select(Attempt).where(Attempt.run_id == parent.run_id, Attempt.number == facts.resumed_from_attempt)
            )
            if there or attempt is None:
                continue
            row: dict[str, Any] = {
                "id": facts.resumed_from_id,
                "run_id": parent.run_id,
                "attempt_id": attempt.id,
                "attempt_number": attempt.number,
                "step": facts.resumed_from_step,
                "kind": CheckpointKind.PERIODIC,
                "world_size": attempt.world_size,
                "state": CheckpointState.DELETED,
                "health": Health.OK,
                "tier": Tier.HOT,
                "logical_bytes": 0,
                "chunk_bytes": 0,
                "uploaded_bytes": 0,
                "metrics": {},
                "labels": [],
                "components": {},
                "created_at": attempt.opened_at,
                "deadline_at": attempt.opened_at,
                "committed_at": attempt.opened_at,
                "deleted_at": facts.opened_at,
            }
            insert_absent(session, Checkpoint, [row])


def settle_deletions(database: Database, report: RebuildReport) -> None:
    """A run's record may tell of its deletion while the record of a checkpoint is older: it goes with its run. A run
    that has a checkpoint which was saved since, or is held, has been taken back, whatever its record says.

    And everything in the trash stays for a while: any record may be older than a person's word to take it back."""
    with database.transaction() as session:
        refuse_unless_rebuilding(session)
        for run in session.scalars(select(Run).where(Run.deleted_at.is_not(None))).all():
            if run.purged_at is None and _lived_on(session, run):
                run.deleted_at = run.deleted_by = run.delete_reason = run.purge_at = None
                subject_changed(session, RecordKind.RUN, run.id, run.project_id)
            else:
                _trash_all(session, run)
        session.flush()
        kept = _give_time(session, database_now(session) + TIME_TO_LOOK)
    if kept:
        report.notes.append(
            f"{counted(kept, 'thing')} in the trash can be taken back for {TIME_TO_LOOK.days} more days: a record may "
            "be older than a person's word to take it back. Look with `--deleted` of `holdfast projects list`, "
            "`holdfast runs list` and `holdfast checkpoints list`"
        )


def _lived_on(session: Session, run: Run) -> bool:
    """What went into the trash with it tells nothing, whatever the clock dated it: it may have gone back in between."""
    is_there = and_(Checkpoint.run_id == run.id, Checkpoint.state == CheckpointState.COMMITTED)
    since = or_(Checkpoint.committed_at > run.deleted_at, is_held(session))
    return bool(session.scalar(select(exists().where(is_there, since))))


def _trash_all(session: Session, run: Run) -> None:
    session.execute(
        update(Checkpoint)
        .where(Checkpoint.run_id == run.id, Checkpoint.state == CheckpointState.COMMITTED)
        .values(
            state=CheckpointState.TRASHED,
            trashed_at=run.deleted_at,
            trashed_by="run",
            trash_reason=run.delete_reason,
            purge_at=run.purge_at,
            version=Checkpoint.version + 1,
        ),
        execution_options={"synchronize_session": False},
    )


def _give_time(session: Session, until: datetime) -> int:
    """How many could have been purged before."""
    over = (Checkpoint.state == CheckpointState.TRASHED, Checkpoint.purge_at < until)
    kept = session.execute(
        update(Checkpoint).where(*over).values(purge_at=until, version=Checkpoint.version + 1).returning(Checkpoint.id),
        execution_options={"synchronize_session": False},
    ).all()
    deleted: list[Run | Project] = []
    for table in (Run, Project):
        deleted += session.scalars(select(table).where(table.purged_at.is_(None), table.purge_at < until))
    for each in deleted:
        each.purge_at = until
        if isinstance(each, Run):
            subject_changed(session, RecordKind.RUN, each.id, each.project_id)
        else:
            subject_changed(session, RecordKind.PROJECT, each.id, each.id)
    return len(kept) + len(deleted)


def mark_missing(database: Database) -> None:
    """Every checkpoint that needs a chunk of which no store has a copy is corrupt, and says which."""
    there = exists().where(Copy.chunk_id == ChunkListEntry.chunk_id, Copy.state.in_(_THERE))
    entries = join(Shard, ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
    with database.read() as session:
        lost = session.execute(
            select(Shard.checkpoint_id, func.count(ChunkListEntry.chunk_id.distinct()))
            .select_from(entries)
            .where(~there)
            .group_by(Shard.checkpoint_id)
            .order_by(Shard.checkpoint_id)
        ).all()
    for checkpoint_id, count in lost:
        with database.transaction() as session:
            refuse_unless_rebuilding(session)
            checkpoint = session.get_one(Checkpoint, checkpoint_id)
            if checkpoint.health == Health.CORRUPT:
                continue
            digest = session.scalars(
                select(Chunk.digest)
                .select_from(entries.join(Chunk, Chunk.id == ChunkListEntry.chunk_id))
                .where(Shard.checkpoint_id == checkpoint_id, ~there)
                .order_by(Chunk.digest)
                .limit(1)
            ).one()
            why = f"After the catalog was rebuilt: {count} of its chunks are in no store, the first is {digest}."
            checkpoint.health_reason = corrupt_reason(why, Health(checkpoint.health), checkpoint.health_reason)
            checkpoint.health = Health.CORRUPT
            checkpoint.version += 1


def mark_cold(database: Database) -> None:
    """Every checkpoint that needs a chunk which has only archived copies must be thawed before it can be read."""
    entry = aliased(ChunkListEntry)
    readable = exists().where(Copy.chunk_id == entry.chunk_id, Copy.state.in_((CopyState.SUSPECT, CopyState.VERIFIED)))
    archived = aliased(Copy)
    with database.read() as session:
        rows = session.execute(
            select(Shard.checkpoint_id, archived.storage_class)
            .join(entry, entry.chunk_list_id == Shard.chunk_list_id)
            .join(archived, archived.chunk_id == entry.chunk_id)
            .where(archived.state.in_((CopyState.COLD, CopyState.THAWING)), ~readable)
            .distinct()
            .order_by(Shard.checkpoint_id)
        ).all()
    coldest: dict[str, str | None] = {}
    for checkpoint_id, place in rows:
        coldest[checkpoint_id] = max(coldest.get(checkpoint_id), place, key=coldness)
    for checkpoint_id, place in coldest.items():
        with database.transaction() as session:
            refuse_unless_rebuilding(session)
            checkpoint = session.get_one(Checkpoint, checkpoint_id)
            if checkpoint.tier != Tier.COLD:
                checkpoint.tier, checkpoint.cold_class = Tier.COLD, place
                checkpoint.version += 1


def finish(database: Database, report: RebuildReport) -> None:
    """Counts what is there, and lets the catalog be served."""
    with database.transaction() as session:
        identity = session.execute(select(CatalogIdentity).with_for_update()).scalar_one()
        for name, table in (("projects", Project), ("runs", Run), ("attempts", Attempt), ("holds", Hold)):
            setattr(report, name, session.scalar(select(func.count()).select_from(table)))
        states = session.execute(
            select(Checkpoint.state, func.count().label("number"))
            .where(Checkpoint.state != CheckpointState.DELETED)
            .group_by(Checkpoint.state)
        )
        report.checkpoints = {row.state: row.number for row in states}
        corrupt = session.execute(
            select(Project.name, Run.name, Checkpoint.step, Checkpoint.attempt_number, Checkpoint.health_reason)
            .join(Run, Run.id == Checkpoint.run_id)
            .join(Project, Project.id == Run.project_id)
            .where(Checkpoint.health == Health.CORRUPT)
            .order_by(Project.name, Run.name, Checkpoint.attempt_number, Checkpoint.step)
        )
        report.corrupt = [f"{project}/{run}@{step}#{attempt}: {why}" for project, run, step, attempt, why in corrupt]
        report.catalog_id, report.epoch = identity.catalog_id, identity.epoch
        _name_doubts(session, report)
        put_doubts(session, report.doubts)
        session.execute(delete(FoundEncoding), execution_options={"synchronize_session": False})
        if identity.rebuilding_from is not None:
            after = {name: value for name, value in report.document().items() if isinstance(value, int)}
            record_event(session, Actor.at_the_database(), "catalog.rebuild", after=after)
        identity.rebuilding_from = None


def _name_doubts(session: Session, report: RebuildReport) -> None:
    """From ids to names. A project without a name keeps its id: a new project under any name is then in doubt."""
    names: dict[str, str] = {row.id: row.name for row in session.execute(select(Project.id, Project.name))}
    named: dict[str, list[str]] = {}
    for project_id, why in sorted(report.doubts.items()):
        known = names.get(project_id)
        reasons = why if known is not None else [f"Of the project with the id {project_id}: {each}" for each in why]
        named.setdefault(EVERY if known is None else known, []).extend(reasons)
    report.doubts = named
