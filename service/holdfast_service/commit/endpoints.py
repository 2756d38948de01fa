"""Routes of the commit protocol. All but the waiting one are plain `def`: they reply after the database committed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool

from holdfast_protocol.checkpoints import (
    AbortCheckpoint,
    BeginCheckpoint,
    CheckpointView,
    FailShard,
    SealOrFail,
)
from holdfast_protocol.states import CheckpointState, Scope
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.commit.abort import abort_checkpoint
from holdfast_service.commit.begin import begin_checkpoint
from holdfast_service.commit.fail import fail_shard
from holdfast_service.commit.read import read_checkpoint
from holdfast_service.commit.seal import seal_shard
from holdfast_service.context import Context
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, tags=["checkpoints"])

LONGEST_WAIT_SECONDS = 60


@router.post("/v1/projects/{project}/runs/{run}/checkpoints", summary="Begin a checkpoint")
def begin(
    project: str,
    run: str,
    body: BeginCheckpoint,
    context: Context,
    caller: Annotated[Principal, require(Scope.TRAIN)],
) -> CheckpointView:
    return begin_checkpoint(context, caller, project, run, body)


@router.put("/v1/checkpoints/{checkpoint_id}/shards/{rank}", summary="Seal a rank's shard, or report that it failed")
def seal(
    checkpoint_id: str,
    rank: int,
    body: SealOrFail,
    context: Context,
    caller: Annotated[Principal, require(Scope.TRAIN)],
) -> CheckpointView:
    if isinstance(body, FailShard):
        return fail_shard(context, caller, checkpoint_id, rank, body)
    return seal_shard(context, caller, checkpoint_id, rank, body)


@router.post("/v1/checkpoints/{checkpoint_id}/abort", summary="Give a checkpoint up")
def abort(
    checkpoint_id: str,
    body: AbortCheckpoint,
    context: Context,
    caller: Annotated[Principal, require(Scope.TRAIN)],
) -> CheckpointView:
    return abort_checkpoint(context, caller, checkpoint_id, body)


@router.get("/v1/checkpoints/{checkpoint_id}", summary="Read a checkpoint, or wait until it is not uploading any more")
async def read(
    checkpoint_id: str,
    response: Response,
    context: Context,
    caller: Annotated[Principal, require(None)],
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="Seconds to wait for the outcome.")] = 0,
) -> CheckpointView:
    view = await run_in_threadpool(read_checkpoint, context, caller, checkpoint_id)
    if wait and view.state == CheckpointState.UPLOADING:
        await context.notifier.wait(checkpoint_id, wait)
        view = await run_in_threadpool(read_checkpoint, context, caller, checkpoint_id)
    response.headers["ETag"] = view.etag
    return view
