"""The operation behind `holdfast drills start`: restores a checkpoint from one store alone, verifies each byte of it.

    choose, as a trainer's restore would if only this store were there -> a read lease
      -> each distinct chunk: read from that store, decoded, hashed; the index documents are kept
      -> the hash tree up to the checkpoint's digest, and the layout, which covers every element of every tensor
      -> how long it took (RTO), and how far behind the newest committed checkpoint it is (RPO)

No other store is asked for anything, so it tells the same whether they answer or not. It may be begun again at any
point. A chunk that is not what it should be fails the drill by name, and becomes suspect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast_protocol.copies import DrillResult, StartDrill
from holdfast_protocol.index_documents import SavedAs
from holdfast_protocol.policies.policy import PolicyKind
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.restores import RestorePoint, Skipped
from holdfast_protocol.runs import ById, Latest, Point
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import CheckpointState, CopyState
from holdfast_service.attached_stores.attached import AttachedStore
from holdfast_service.auth.principal import Principal
from holdfast_service.context import ServiceContext
from holdfast_service.copies.predicates import PROVEN, is_readable
from holdfast_service.db.dialect import database_now
from holdfast_service.db.tables.core import Checkpoint, Chunk, ChunkListEntry, Copy, Project, Run, Shard
from holdfast_service.db.tables.operations import Operation
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.restore_choice import AvailableStores, choose_restore_point, point_of
from holdfast_service.operations.queue import OperationRun, start_operation
from holdfast_service.policies.policies import effective_policy
from holdfast_service.replicate.lag import Objectives, objectives_of
from holdfast_service.restore.service_reader import (
    BadChunkError,
    SealedShard,
    StoredChunk,
    end_leases,
    proven_layout,
    read_verified,
    renew_leases,
    sealed_shards,
    suspect,
    take_lease,
)
from holdfast_service.runs.views import no_checkpoint, run_named


@dataclass(frozen=True)
class DrillPlan:
    project: str
    run: str
    saved_in: str
    point: RestorePoint
    skipped: list[Skipped]
    shards: list[SealedShard]
    copies: dict[str, StoredChunk]
    newest_step: int
    newest_committed_at: datetime
    objectives: Objectives
    lease_id: str


def plan_drill(
    session: Session, context: ServiceContext, attached: AttachedStore, run: OperationRun, request: StartDrill
) -> DrillPlan:
    project, found = session.execute(
        select(Project, Run).join(Run, Run.project_id == Project.id).where(Run.id == run.run_id)
    ).one()
    available = AvailableStores((attached.store_id,), f"Only the {attached.role.value} store is read.")
    decision = choose_restore_point(session, found.id, point_of(request.selector), available=available, strictly=True)
    if decision.restore_point is None:
        reasons = " ".join(each.detail for each in decision.skipped[:3])
        raise ProblemError(
            ProblemCode.NO_RESTORE_POINT,
            f"{project.name}/{found.name} has nothing that can be restored as {request.selector} from the "
            f"{attached.role.value} store alone. {reasons} `holdfast copies list {project.name}/{found.name}` tells "
            "how far it is behind.",
        )
    point = decision.restore_point
    checkpoint = session.execute(
        select(Checkpoint).where(Checkpoint.id == point.checkpoint_id).with_for_update(read=True, key_share=True)
    ).scalar_one()
    # So that a checkpoint's drills are found, whatever selector led to it.
    session.execute(update(Operation).where(Operation.id == run.id).values(checkpoint_id=checkpoint.id))
    shards, _ = sealed_shards(session, checkpoint.id)
    # Not by the moment of the commit: the clock may have been ahead at an earlier one, and what is detached is no newer
    # state.
    newest = session.execute(
        select(Checkpoint.step, Checkpoint.committed_at)
        .where(Checkpoint.run_id == found.id, Checkpoint.state == CheckpointState.COMMITTED)
        .order_by(Checkpoint.detached, Checkpoint.attempt_number.desc(), Checkpoint.step.desc())
        .limit(1)
    ).one()
    return DrillPlan(
        project=project.name,
        run=found.name,
        saved_in=found.name if checkpoint.forked_from is None else checkpoint.forked_from["saved_in"],
        point=point,
        skipped=decision.skipped,
        shards=shards,
        copies=_copies(session, attached, checkpoint, {digest for shard in shards for digest in shard.chunks}),
        newest_step=newest.step,
        newest_committed_at=newest.committed_at,
        objectives=_objectives(session, found, request),
        lease_id=take_lease(session, context, run.id, checkpoint.id),
    )


def _objectives(session: Session, run: Run, request: StartDrill) -> Objectives:
    """How old the checkpoint is that a person has named says nothing of the copies: that is no RPO."""
    found = objectives_of(effective_policy(session, PolicyKind.OBJECTIVES, run.project_id, run.id))
    return found if isinstance(point_of(request.selector), Latest) else replace(found, rpo_seconds=None)


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
    found = {chunk.digest: StoredChunk.of(chunk, copy) for copy, chunk in rows}
    if missing := sorted(digests - found.keys()):
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"Step {checkpoint.step} is not whole in the {attached.role.value} store: {len(missing)} of its "
            f"{len(digests)} chunks are not there, {missing[0][:12]} among them. Wait for the copy, or drill `latest`.",
        )
    return found


_THREADS = 4
_RENEW_EVERY_SECONDS = 60


def read_all(context: ServiceContext, attached: AttachedStore, plan: DrillPlan, run: OperationRun) -> dict[str, bytes]:
    """Reads every chunk of the checkpoint from its store, decoded as a reader would, and hashes it; gives the index
    documents back."""
    documents = {shard.index for shard in plan.shards} | {shard.layout for shard in plan.shards if shard.layout}
    kept: dict[str, bytearray] = {}
    done, renewed_at = 0, time.monotonic()
    total = sum(stored.bytes for stored in plan.copies.values())
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="holdfast-drill")
    try:
        reading = {
            threads.submit(read_verified, attached.store, stored, _sink(kept, stored, documents)): stored
            for stored in plan.copies.values()
        }
        for future in as_completed(reading):
            stored = reading[future]
            future.result()
            done += stored.bytes
            if time.monotonic() - renewed_at > _RENEW_EVERY_SECONDS:
                renew_leases(context, plan.lease_id)
                renewed_at = time.monotonic()
            run.progress(done=done, total=total, note=f"reads step {plan.point.step}")
    except BadChunkError as error:
        suspect(context, error.stored)
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"The {attached.role.value} store alone does not give back step {plan.point.step} of {plan.project}/"
            f"{plan.run}: its chunk {error.stored.digest[:12]} {error}. It is read again and repaired; drill once more "
            "then.",
        ) from error
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
    return {digest: bytes(data) for digest, data in kept.items()}


def _sink(
    kept: dict[str, bytearray], stored: StoredChunk, documents: set[str]
) -> Callable[[bytes | memoryview], object]:
    if stored.digest not in documents:
        return lambda _: None
    return kept.setdefault(stored.digest, bytearray()).extend


def run_drill(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    """A DrillResult. Raises ProblemError for what the store alone cannot give back, with the reason, and StoreError
    if it does not answer."""
    request = StartDrill.model_validate(run.arguments)
    attached = context.attached(request.store)
    if attached is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST, f"This process has no {request.store} store. Give it the service's settings."
        )
    began = time.monotonic()
    run.progress(note="chooses the checkpoint")
    plan = context.database.run(lambda session: plan_drill(session, context, attached, run, request))
    try:
        documents = read_all(context, attached, plan, run)
        saved_as = SavedAs(f"{plan.project}/{plan.saved_in}", plan.point.step, plan.point.world_size)
        sizes = {digest: stored.bytes for digest, stored in plan.copies.items()}
        layout = proven_layout(plan.shards, sizes, lambda _: documents, plan.point.digest, saved_as)
    finally:
        end_leases(context, plan.lease_id)
    seconds = time.monotonic() - began
    size = sum(stored.bytes for stored in plan.copies.values())
    return DrillResult(
        project=plan.project,
        run=plan.run,
        store=request.store,
        checkpoint_id=plan.point.checkpoint_id,
        step=plan.point.step,
        attempt=plan.point.attempt,
        logical_bytes=plan.point.logical_bytes,
        tensors=len(layout.tensors),
        chunks=len(plan.copies),
        bytes=size,
        stored_bytes=sum(stored.stored_bytes for stored in plan.copies.values()),
        seconds=seconds,
        bytes_per_second=size / seconds if seconds else 0.0,
        newest_step=plan.newest_step,
        rpo_seconds=max(0.0, (plan.newest_committed_at - plan.point.committed_at).total_seconds()),
        rpo_steps=max(0, plan.newest_step - plan.point.step),
        rto_objective_seconds=plan.objectives.rto_seconds,
        rpo_objective_seconds=plan.objectives.rpo_seconds,
        skipped=plan.skipped,
    ).model_dump(mode="json")


KIND = "drill"


def start_drill(
    context: ServiceContext, caller: Principal, project: str, run: str, request: StartDrill, *, key: str | None
) -> OperationView:
    """Starts a drill: an operation, which any worker carries out. Raises `forbidden`, `project_not_found`,
    `run_not_found`, `checkpoint_not_found` for an id that is none of the run's, and `invalid_request` for a selector
    that is none and a store that the service does not have."""
    point = point_of(request.selector)
    if context.attached(request.store) is None:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"This service has no {request.store} store. Set HOLDFAST_{request.store.upper()}_STORE, or drill another.",
            store=request.store.value,
        )
    with context.database.transaction() as session:
        owner, found = run_named(session, caller, project, run)
        return start_operation(
            session,
            caller,
            KIND,
            project_id=owner.id,
            run_id=found.id,
            checkpoint_id=_named(session, found, point),
            arguments=request.model_dump(mode="json"),
            key=key,
        )


def _named(session: Session, run: Run, point: Point) -> str | None:
    """None: which one it is turns out when the drill begins."""
    if not isinstance(point, ById):
        return None
    found = session.scalar(
        select(Checkpoint.id).where(Checkpoint.id == point.checkpoint_id, Checkpoint.run_id == run.id)
    )
    if found is None:
        raise no_checkpoint(point.checkpoint_id)
    return found
