"""Routes of the way back: the restore point, what a checkpoint consists of, tickets to read, reports of bad chunks. The
bytes themselves are read from the store, or through `/v1/objects`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_protocol.base import PROTOCOL_VERSION, minor_of
from holdfast_protocol.checkpoints import Manifest, ShardChunks, Step
from holdfast_protocol.restores import ChunkReads, ChunkVerdict, ReadChunks, ReportChunk, RestoreDecision
from holdfast_protocol.runs import Best, Latest
from holdfast_service.auth.principal import Principal
from holdfast_service.context import Context, ServiceContext
from holdfast_service.lineage.restore_choice import (
    available_stores,
    choose_restore_point,
    known_to,
    point_of,
    with_environment,
    without_doubt,
)
from holdfast_service.records.history import settle_history
from holdfast_service.restore.read_checkpoint import read_chunks, read_manifest, read_shard_chunks, release_lease
from holdfast_service.restore.report_chunk import report_chunk
from holdfast_service.runs.views import run_named
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import ProtocolSpoken, Reader


def find_restore_point(
    context: ServiceContext,
    caller: Principal,
    project: str,
    run: str,
    *,
    selector: str,
    before_step: int | None,
    diverged: bool,
) -> RestoreDecision:
    """Raises `forbidden`, `project_not_found`, `run_not_found`, `invalid_request`; for a step or an id that was named,
    `checkpoint_not_found` and `no_restore_point`; for another, `catalog_went_back`; `commits_unknown` as
    opening an attempt does.
    """
    point = point_of(selector)
    if isinstance(point, Latest | Best):  # a step that a person names can be read all the same
        settle_history(context)
    available = available_stores(context)
    with context.database.read() as session:
        _, found = run_named(session, caller, project, run)
        decision = choose_restore_point(
            session, found.id, point, before_step=before_step, available=available, diverged=diverged
        )
        return with_environment(session, found.id, without_doubt(session, project, run, decision))


router = APIRouter(route_class=GuardedRoute, tags=["restores"])
checkpoints_router = APIRouter(route_class=GuardedRoute, tags=["checkpoints"])


@router.get(
    "/v1/projects/{project}/runs/{run}/restore-point",
    summary="Which checkpoint would be restored now, and why not a newer one",
)
def restore_point(
    *,
    project: str,
    run: str,
    context: Context,
    caller: Reader,
    selector: Annotated[
        str, Query(max_length=200, description="latest, 1200, 1200#3, best:loss:min or ck_…", examples=["latest"])
    ] = "latest",
    before_step: Annotated[Step | None, Query(description="Only steps below this one count.")] = None,
    diverged: Annotated[bool, Query(description="What has diverged will do as well.")] = False,
    spoken: ProtocolSpoken = PROTOCOL_VERSION,
) -> RestoreDecision:
    decision = find_restore_point(
        context, caller, project, run, selector=selector, before_step=before_step, diverged=diverged
    )
    return decision.model_copy(update={"skipped": known_to(decision.skipped, minor_of(spoken))})


@checkpoints_router.get(
    "/v1/checkpoints/{checkpoint_id}/manifest", summary="What a checkpoint consists of, shard by shard"
)
def show_manifest(
    checkpoint_id: str, context: Context, caller: Reader, spoken: ProtocolSpoken = PROTOCOL_VERSION
) -> Manifest:
    return read_manifest(context, caller, checkpoint_id, minor_of(spoken))


@checkpoints_router.get(
    "/v1/checkpoints/{checkpoint_id}/shards/{rank}", summary="The chunks of one shard, in their order"
)
def show_shard(checkpoint_id: str, rank: int, context: Context, caller: Reader) -> ShardChunks:
    return read_shard_chunks(context, caller, checkpoint_id, rank)


@router.post("/v1/checkpoints/{checkpoint_id}/reads", summary="Tickets to read chunks, under a lease")
def read_tickets(
    checkpoint_id: str, body: ReadChunks, context: Context, caller: Reader, spoken: ProtocolSpoken = PROTOCOL_VERSION
) -> ChunkReads:
    return read_chunks(context, caller, checkpoint_id, body, minor_of(spoken))


@router.delete("/v1/read-leases/{lease_id}", status_code=204, summary="End a read lease before its time")
def release(lease_id: str, context: Context, caller: Reader) -> None:
    release_lease(context, caller, lease_id)


@router.post(
    "/v1/checkpoints/{checkpoint_id}/chunk-reports",
    summary="Report a chunk that could not be read; the service reads it again and marks what is lost",
)
def report(checkpoint_id: str, body: ReportChunk, context: Context, caller: Reader) -> ChunkVerdict:
    return report_chunk(context, caller, checkpoint_id, body)
