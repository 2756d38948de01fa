"""The operation behind `holdfast drill`: restores a checkpoint from one store alone, and verifies every byte of it.

    choose, as a trainer's restore would if only this store were there -> a read lease
      -> each distinct chunk: read from that store, decoded, hashed; the index documents are kept
      -> the hash tree up to the checkpoint's digest, and the layout, which covers every element of every tensor
      -> how long it took (RTO), and how far behind the newest committed checkpoint it is (RPO)

No other store is asked for anything, so it tells the same whether they answer or not. It may be begun again at any
point. A chunk that is not what it should be fails the drill by name, and becomes suspect.
"""

from __future__ import annotations

import time
from typing import Any

from holdfast_protocol.canonical_json import DocumentError
from holdfast_protocol.copies import DrillResult, StartDrill
from holdfast_protocol.digests import checkpoint_digest, shard_digest
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex
from holdfast_protocol.problems import ProblemCode
from holdfast_service.catalog.operation_run import OperationRun
from holdfast_service.context import ServiceContext
from holdfast_service.errors import ProblemError
from holdfast_service.replicate.drill_plan import DrillPlan, end_lease, plan_drill
from holdfast_service.replicate.drill_read import read_all


def run_drill(context: ServiceContext, run: OperationRun) -> dict[str, Any]:
    """A DrillResult. Raises ProblemError for what the store alone cannot give back, with the reason, and StoreError
    where it does not answer."""
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
        layout = _check_documents(plan, documents)
    finally:
        end_lease(context, plan.lease_id)
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
        passed_over=plan.passed_over,
    ).model_dump(mode="json")


def _check_documents(plan: DrillPlan, documents: dict[str, bytes]) -> Layout:
    """The hash tree and the index. Raises ProblemError."""
    try:
        for shard in plan.shards:
            if shard_digest(shard.chunks) != shard.digest:
                raise DocumentError(f"the chunk list of rank {shard.rank} does not make the shard's digest")
        if checkpoint_digest([shard.digest for shard in plan.shards]) != plan.point.digest:
            raise DocumentError("the shards do not make the checkpoint's digest")
        layout = Layout.decode(documents[next(shard.layout for shard in plan.shards if shard.layout)])
        saved_as = SavedAs(f"{plan.project}/{plan.run}", plan.point.step, plan.point.world_size)
        for shard in plan.shards:
            index = ShardIndex.decode(documents[shard.index])
            if (index.saved_as, index.rank, index.layout_digest) != (saved_as, shard.rank, layout.digest):
                raise DocumentError(f"what rank {shard.rank} sealed is rank {index.rank} of {index.saved_as}")
            sizes = [plan.copies[digest].bytes for digest in shard.chunks]
            if sizes[: len(layout.shards[shard.rank].chunks)] != list(layout.shards[shard.rank].chunks):
                raise DocumentError(f"the chunks of rank {shard.rank} have other sizes than the layout says")
    except (DocumentError, StopIteration, KeyError, IndexError) as error:
        raise ProblemError(
            ProblemCode.CHUNK_GONE,
            f"Every chunk of step {plan.point.step} has its digest, and still it cannot be put together: {error}. "
            "Keep the checkpoint and report this.",
        ) from error
    return layout
