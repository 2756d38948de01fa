"""Routes of the way back. The bytes themselves are read from the store, or through `/v1/objects`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query

from holdfast_protocol.checkpoints import Step
from holdfast_protocol.restore import ChunkReads, ChunkVerdict, ReadChunks, ReportChunk, RestoreDecision
from holdfast_protocol.states import Scope
from holdfast_protocol.version import PROTOCOL_HEADER, PROTOCOL_VERSION, minor_of
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.catalog.restore_choice import known_to
from holdfast_service.context import Context
from holdfast_service.restore.read_chunks import read_chunks
from holdfast_service.restore.release_lease import release_lease
from holdfast_service.restore.report_chunk import report_chunk
from holdfast_service.restore.restore_point import find_restore_point
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["restore"])

Reader = Annotated[Principal, require(Scope.READ)]
ProtocolSpoken = Annotated[str, Header(alias=PROTOCOL_HEADER, description="The client's version.")]


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
    return decision.model_copy(update={"passed_over": known_to(decision.passed_over, minor_of(spoken))})


@router.post("/v1/checkpoints/{checkpoint_id}/reads", summary="Tickets to read chunks, under a lease")
def reads(
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
