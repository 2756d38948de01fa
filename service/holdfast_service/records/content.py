"""What a record says, read from the catalog (rule record-outbox). Called within one transaction per document, so that
what belongs together is from one moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from holdfast_protocol.checkpoints import ForkedFrom
from holdfast_protocol.codecs import Codec
from holdfast_protocol.states import CopyState
from holdfast_service.db.tables.core import (
    QUOTA_COLUMNS,
    Attempt,
    Checkpoint,
    Chunk,
    ChunkListEntry,
    Copy,
    Project,
    Run,
    Shard,
)
from holdfast_service.db.tables.operations import Hold, Policy
from holdfast_service.records.documents import (
    AttemptFacts,
    CheckpointFacts,
    CheckpointRecord,
    DeletionFacts,
    HoldFacts,
    ListRecord,
    ManifestRecord,
    PolicyFacts,
    ProjectFacts,
    ProjectRecord,
    Record,
    RunFacts,
    RunRecord,
    ShardFacts,
)

_ENCODED_STATES = (CopyState.VERIFIED, CopyState.SUSPECT, CopyState.COLD, CopyState.THAWING)


class RecordAuthor(Protocol):
    """The catalog in whose name a record is made: a service's context, or a database that no process serves now."""

    @property
    def catalog_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...


def project_record(session: Session, author: RecordAuthor, project_id: str, version: int) -> ProjectRecord:
    project = session.get_one(Project, project_id)
    policies = session.scalars(
        select(Policy).where(Policy.project_id == project_id).order_by(Policy.run_id, Policy.kind)
    )
    return ProjectRecord(
        catalog_id=author.catalog_id,
        epoch=author.epoch,
        version=version,
        project=ProjectFacts(id=project.id, name=gone_name(project)),
        quota_bytes=project.quota_bytes,
        created_at=project.created_at,
        policies=[_facts(PolicyFacts, row) for row in policies],
        deletion=_deletion(project),
        quotas={
            name: quota
            for name in QUOTA_COLUMNS
            if name != "quota_bytes" and (quota := getattr(project, name)) is not None
        },
    )


def run_record(session: Session, author: RecordAuthor, run_id: str, version: int) -> RunRecord:
    run = session.get_one(Run, run_id)
    project = session.get_one(Project, run.project_id)
    theirs = select(Attempt).where(Attempt.run_id == run_id).order_by(Attempt.number)
    attempts = [] if run.purged_at is not None else session.scalars(theirs).all()
    return RunRecord(
        catalog_id=author.catalog_id,
        epoch=author.epoch,
        version=version,
        project=ProjectFacts(id=project.id, name=project.name),
        run=RunFacts(id=run.id, name=gone_name(run)),
        latest_attempt=run.latest_attempt,
        created_at=run.created_at,
        attempts=_attempts(session, attempts),
        deletion=_deletion(run),
        tags=list(run.tags),
        note=run.note,
        forked_from=None if run.forked_from is None else ForkedFrom.model_validate(run.forked_from),
    )


def gone_name(found: Project | Run) -> str:
    """The name of a project or run. A purged one gets a name that no client can give, and its own becomes free."""
    return found.name if found.purged_at is None or "~" in found.name else found.name + gone_suffix(found.id)


def gone_suffix(subject_id: str) -> str:
    """No name that is given may have a ~ in it."""
    return f"~{subject_id}"


def _deletion(found: Project | Run) -> DeletionFacts | None:
    return None if found.deleted_at is None else _facts(DeletionFacts, found)


def checkpoint_record(session: Session, author: RecordAuthor, checkpoint: Checkpoint) -> CheckpointRecord:
    """The record of the version that the row has now."""
    run = session.get_one(Run, checkpoint.run_id)
    project = session.get_one(Project, run.project_id)
    holds = session.scalars(select(Hold).where(Hold.checkpoint_id == checkpoint.id).order_by(Hold.placed_at, Hold.id))
    return CheckpointRecord(
        catalog_id=author.catalog_id,
        epoch=author.epoch,
        version=checkpoint.version,
        project=ProjectFacts(id=project.id, name=project.name),
        run=RunFacts(id=run.id, name=run.name),
        attempt=_attempts(session, [session.get_one(Attempt, checkpoint.attempt_id)])[0],
        checkpoint=_checkpoint_facts(checkpoint),
        holds=[_facts(HoldFacts, row) for row in holds],
        **{name: getattr(checkpoint, name) for name in CHANGING},
    )


# The columns that a checkpoint's record has beside what never changes.
CHANGING = tuple(
    name
    for name in CheckpointRecord.model_fields
    if name not in {"kind", "catalog_id", "epoch", "version", "project", "run", "attempt", "checkpoint", "holds"}
)


def manifest_record(session: Session, author: RecordAuthor, checkpoint: Checkpoint) -> ManifestRecord:
    run = session.get_one(Run, checkpoint.run_id)
    project = session.get_one(Project, run.project_id)
    shards = session.scalars(select(Shard).where(Shard.checkpoint_id == checkpoint.id).order_by(Shard.rank))
    return ManifestRecord(
        catalog_id=author.catalog_id,
        project=ProjectFacts(id=project.id, name=project.name),
        run=RunFacts(id=run.id, name=run.name),
        attempt=_attempts(session, [session.get_one(Attempt, checkpoint.attempt_id)])[0],
        checkpoint=_checkpoint_facts(checkpoint),
        shards=[_facts(ShardFacts, row, **dict(row.summary)) for row in shards],
    )


def list_record(session: Session, chunk_list_id: int, digest: str) -> ListRecord:
    entries = (
        select(ChunkListEntry.ordinal, Chunk.id, Chunk.digest, Chunk.bytes)
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(ChunkListEntry.chunk_list_id == chunk_list_id)
        .order_by(ChunkListEntry.ordinal)
    )
    encoded = (
        select(ChunkListEntry.ordinal, Copy.codec, Copy.stored_bytes, Copy.stored_digest)
        .join(Copy, Copy.chunk_id == ChunkListEntry.chunk_id)
        .where(
            ChunkListEntry.chunk_list_id == chunk_list_id,
            Copy.codec != Codec.RAW,
            Copy.state.in_(_ENCODED_STATES),
        )
        .order_by(ChunkListEntry.ordinal, Copy.codec, Copy.stored_bytes, Copy.stored_digest)
        .distinct()
    )
    return ListRecord(
        digest=digest,
        chunks=[(row.digest, row.bytes) for row in session.execute(entries)],
        encoded=[(row.ordinal, row.codec, row.stored_bytes, row.stored_digest) for row in session.execute(encoded)],
    )


def _attempts(session: Session, attempts: Sequence[Attempt]) -> list[AttemptFacts]:
    parent = aliased(Checkpoint)
    parents = {
        row.id: (row.attempt_number, row.step)
        for row in session.execute(
            select(parent.id, parent.attempt_number, parent.step).where(
                parent.id.in_({each.resumed_from_id for each in attempts if each.resumed_from_id})
            )
        )
    }
    facts = []
    for each in attempts:
        number, step = parents.get(each.resumed_from_id or "", (None, None))
        extra = {"resumed_from_attempt": number, "resumed_from_step": step}
        facts.append(_facts(AttemptFacts, each, **extra))
    return facts


def _checkpoint_facts(row: Checkpoint) -> CheckpointFacts:
    return _facts(CheckpointFacts, row, attempt=row.attempt_number)


def _facts(model: type[Record], row: object, **extra: object) -> Record:
    """The columns that the model names."""
    named = {name: getattr(row, name) for name in model.model_fields if name not in extra}
    return model.model_validate(named | extra)
