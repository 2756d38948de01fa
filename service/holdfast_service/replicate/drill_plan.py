"""What a drill reads: the checkpoint that one store alone gives back, its shards, its copies there, under a lease."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from holdfast_protocol.codecs import Codec
from holdfast_protocol.copies import StartDrill
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restore import PassedOver, RestorePoint
from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.attached_store import AttachedStore
from holdfast_service.catalog.copies import PROVEN, is_readable, object_key
from holdfast_service.catalog.operation_run import OperationRun
from holdfast_service.catalog.points import point_of
from holdfast_service.catalog.reach import Reach
from holdfast_service.catalog.restore_choice import choose_restore_point
from holdfast_service.catalog.tables import Checkpoint, Chunk, ChunkListEntry, Copy, Project, ReadLease, Run, Shard
from holdfast_service.clock import database_now
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.stores.base import ObjectKey


@dataclass(frozen=True)
class StoredChunk:
    """A chunk's copy in the store, by its row."""

    copy_id: int
    digest: str
    bytes: int
    key: ObjectKey
    codec: Codec
    stored_bytes: int


@dataclass(frozen=True)
class SealedShard:
    """One rank's shard: the digests of its chunks, by ordinal."""

    rank: int
    digest: str
    chunks: list[str]
    index: str
    layout: str | None


@dataclass(frozen=True)
class DrillPlan:
    project: str
    run: str
    point: RestorePoint
    passed_over: list[PassedOver]
    shards: list[SealedShard]
    copies: dict[str, StoredChunk]
    newest_step: int
    newest_committed_at: datetime
    lease_id: str


def plan_drill(
    session: Session, context: ServiceContext, attached: AttachedStore, run: OperationRun, request: StartDrill
) -> DrillPlan:
    project, found = session.execute(
        select(Project, Run).join(Run, Run.project_id == Project.id).where(Run.id == run.run_id)
    ).one()
    reach = Reach((attached.store_id,), f"Only the {attached.role.value} store is read.")
    decision = choose_restore_point(session, found.id, point_of(request.selector), reach=reach, strictly=True)
    if decision.restore_point is None:
        reasons = " ".join(each.detail for each in decision.passed_over[:3])
        raise ProblemError(
            ProblemCode.NO_RESTORE_POINT,
            f"{project.name}/{found.name} has nothing that can be restored as {request.selector} from the "
            f"{attached.role.value} store alone. {reasons} `holdfast copies {project.name}/{found.name}` tells how far "
            "it is behind.",
        )
    point = decision.restore_point
    checkpoint = session.execute(
        select(Checkpoint).where(Checkpoint.id == point.checkpoint_id).with_for_update(read=True, key_share=True)
    ).scalar_one()
    shards = _shards(session, checkpoint.id)
    newest = session.execute(
        select(Checkpoint.step, Checkpoint.committed_at)
        .where(Checkpoint.run_id == found.id, Checkpoint.state == CheckpointState.COMMITTED)
        .order_by(Checkpoint.committed_at.desc(), Checkpoint.step.desc())
        .limit(1)
    ).one()
    return DrillPlan(
        project=project.name,
        run=found.name,
        point=point,
        passed_over=decision.passed_over,
        shards=shards,
        copies=_copies(session, attached, checkpoint, {digest for shard in shards for digest in shard.chunks}),
        newest_step=newest.step,
        newest_committed_at=newest.committed_at,
        lease_id=_take_lease(session, context, run, checkpoint.id),
    )


def _shards(session: Session, checkpoint_id: str) -> list[SealedShard]:
    rows = session.execute(
        select(Shard, Chunk.digest)
        .join(ChunkListEntry, ChunkListEntry.chunk_list_id == Shard.chunk_list_id)
        .join(Chunk, Chunk.id == ChunkListEntry.chunk_id)
        .where(Shard.checkpoint_id == checkpoint_id)
        .order_by(Shard.rank, ChunkListEntry.ordinal)
    )
    chunks: dict[int, tuple[Shard, list[str]]] = {}
    for shard, digest in rows:
        chunks.setdefault(shard.rank, (shard, []))[1].append(digest)
    sealed = []
    for rank, (shard, digests) in sorted(chunks.items()):
        layout = None if shard.layout_ordinal is None else digests[shard.layout_ordinal]
        sealed.append(SealedShard(rank, shard.digest or "", digests, digests[shard.index_ordinal or 0], layout))
    return sealed


def _copies(
    session: Session, attached: AttachedStore, checkpoint: Checkpoint, digests: set[str]
) -> dict[str, StoredChunk]:
    rows = session.execute(
        select(Copy, Chunk)
        .join(Chunk, Chunk.id == Copy.chunk_id)
        .join(ChunkListEntry, ChunkListEntry.chunk_id == Chunk.id)
        .join(Shard, Shard.chunk_list_id == ChunkListEntry.chunk_list_id)
        .where(
            Shard.checkpoint_id == checkpoint.id,
            Copy.state != CopyState.SUSPECT,
            is_readable((attached.store_id,), checkpoint.attempt_id, until=database_now(session)),
        )
        .order_by(Copy.proof.in_(PROVEN), Copy.id.desc())
    )
    found = {
        chunk.digest: StoredChunk(
            copy.id,
            chunk.digest,
            chunk.bytes,
            object_key(copy.project_id, chunk.digest, copy),
            Codec(copy.codec),
            copy.stored_bytes,
        )
        for copy, chunk in rows
    }
    if missing := sorted(digests - found.keys()):
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"Step {checkpoint.step} is not whole in the {attached.role.value} store: {len(missing)} of its "
            f"{len(digests)} chunks are not there, {missing[0][:12]} among them. Wait for the copy, or drill `latest`.",
        )
    return found


def _take_lease(session: Session, context: ServiceContext, run: OperationRun, checkpoint_id: str) -> str:
    """As any reader's (rule 21): nothing of it is purged meanwhile."""
    now = database_now(session)
    lease = ReadLease(
        id=uuid.uuid4().hex,
        checkpoint_id=checkpoint_id,
        token_id=f"operation {run.id}",
        created_at=now,
        expires_at=now + timedelta(seconds=context.settings.read_lease_seconds),
    )
    session.add(lease)
    session.flush()
    return lease.id


def renew_lease(context: ServiceContext, lease_id: str) -> None:
    with context.database.transaction() as session:
        expires_at = database_now(session) + timedelta(seconds=context.settings.read_lease_seconds)
        session.execute(update(ReadLease).where(ReadLease.id == lease_id).values(expires_at=expires_at))


def end_lease(context: ServiceContext, lease_id: str) -> None:
    with context.database.transaction() as session:
        session.execute(delete(ReadLease).where(ReadLease.id == lease_id))
