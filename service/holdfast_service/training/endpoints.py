"""Routes of training jobs: attempts, chunks, shards and the outcome of a checkpoint.

The routes of the commit protocol are plain `def`, except the waiting one: they reply after the database committed.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from holdfast_protocol.attempts import (
    AttemptOpened,
    AttemptView,
    ConfigView,
    EndAttempt,
    Heartbeat,
    HeartbeatReply,
    OpenAttempt,
    ResumedFrom,
)
from holdfast_protocol.base import PROTOCOL_VERSION, Name, Page, minor_of
from holdfast_protocol.checkpoints import (
    AbortCheckpoint,
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointView,
    ChunksNegotiated,
    FailShard,
    MountProofOffer,
    NegotiateChunks,
    SealOrFail,
    SealShards,
)
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import CheckpointState
from holdfast_service.attached_stores.attached import offer_mount_proof
from holdfast_service.context import Context, ServiceContext
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.errors import ProblemError
from holdfast_service.lineage.restore_choice import known_to
from holdfast_service.runs.views import read_checkpoint
from holdfast_service.training.abort import abort_checkpoint, fail_shard
from holdfast_service.training.attempts import (
    end_attempt,
    list_attempts,
    open_attempt,
    read_attempt,
    record_resumed_from,
    take_heartbeat,
)
from holdfast_service.training.begin import begin_and_negotiate
from holdfast_service.training.configs import read_config
from holdfast_service.training.negotiate import negotiate_chunks
from holdfast_service.training.seal import seal_shards
from holdfast_service.web.admission import Permit, on_a_thread
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import BusyTrainer, Cursor, Limit, ProtocolSpoken, ReaderOrTrainer, Trainer, tagged

attempts_router = APIRouter(
    route_class=GuardedRoute, prefix="/v1/projects/{project}/runs/{run}/attempts", tags=["attempts"]
)

Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


@attempts_router.post("", status_code=201, summary="Open an attempt; every older one is fenced")
def open_(
    *,
    project: Name,
    run: Name,
    body: OpenAttempt,
    context: Context,
    caller: Trainer,
    spoken: ProtocolSpoken = PROTOCOL_VERSION,
) -> AttemptOpened:
    opened = open_attempt(context, caller, project, run, body)
    return opened.model_copy(update={"skipped": known_to(opened.skipped, minor_of(spoken))})


@attempts_router.get("", summary="List the attempts of a run, the newest first")
def list_(
    project: str,
    run: str,
    context: Context,
    caller: ReaderOrTrainer,
    *,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[AttemptView]:
    return list_attempts(context, caller, project, run, cursor=cursor, limit=limit)


@attempts_router.get("/{number}", summary="Show an attempt", name="show")
def show_attempt(project: str, run: str, number: Number, context: Context, caller: ReaderOrTrainer) -> AttemptView:
    return read_attempt(context, caller, project, run, number)


@attempts_router.get(
    "/{number}/config", summary="Show the configuration of an attempt, and what is another than before"
)
def config(
    *,
    project: str,
    run: str,
    number: Number,
    context: Context,
    caller: ReaderOrTrainer,
    against: Annotated[
        int | None, Query(ge=1, le=2**31 - 1, description="Compare it with this attempt, and not with the one before.")
    ] = None,
) -> ConfigView:
    return read_config(context, caller, project, run, number, against=against)


@attempts_router.put("/{number}/resumed-from", summary="Say what the ranks have really loaded")
def put_resumed_from(
    project: str, run: str, number: Number, body: ResumedFrom, *, context: Context, caller: Trainer
) -> AttemptView:
    _refuse_other_number(number, body.attempt)
    return record_resumed_from(context, caller, project, run, body)


@attempts_router.post("/{number}/heartbeat", summary="Say that the attempt is alive")
def heartbeat(
    project: str, run: str, number: Number, body: Heartbeat, *, context: Context, caller: BusyTrainer
) -> HeartbeatReply:
    _refuse_other_number(number, body.attempt)
    return take_heartbeat(context, caller, project, run, body)


@attempts_router.post("/{number}/end", summary="Say how the attempt ended")
def end(project: str, run: str, number: Number, body: EndAttempt, *, context: Context, caller: Trainer) -> AttemptView:
    _refuse_other_number(number, body.attempt)
    return end_attempt(context, caller, project, run, body)


def _refuse_other_number(in_path: int, in_body: int) -> None:
    if in_path != in_body:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The path names attempt {in_path} and the body attempt {in_body}. Give the same number in both.",
        )


uploads_router = APIRouter(route_class=GuardedRoute, tags=["uploads"])


@uploads_router.post(
    "/v1/checkpoints/{checkpoint_id}/shards/{rank}/chunks", summary="Negotiate chunks, report finished ones"
)
def negotiate(
    checkpoint_id: str,
    rank: int,
    body: NegotiateChunks,
    context: Context,
    caller: BusyTrainer,
) -> ChunksNegotiated:
    return negotiate_chunks(context, caller, checkpoint_id, rank, body)


@uploads_router.post(
    "/v1/mount-proofs", status_code=201, summary="A nonce on the store's filesystem, for clients that see its mount"
)
def create_mount_proof(context: Context, caller: ReaderOrTrainer) -> MountProofOffer:
    return offer_mount_proof(context)


checkpoints_router = APIRouter(route_class=GuardedRoute, tags=["checkpoints"])

LONGEST_WAIT_SECONDS = 60


@checkpoints_router.post("/v1/projects/{project}/runs/{run}/checkpoints", status_code=201, summary="Begin a checkpoint")
def begin(
    project: str,
    run: str,
    body: BeginCheckpoint,
    context: Context,
    caller: BusyTrainer,
) -> CheckpointBegun:
    begun = begin_and_negotiate(context, caller, project, run, body)
    context.load.note_checkpoint(begun.id, project)
    return begun


@checkpoints_router.put(
    "/v1/checkpoints/{checkpoint_id}/shards/{rank}", summary="Seal a rank's shard, or report that it failed"
)
def seal(
    checkpoint_id: str,
    rank: int,
    body: SealOrFail,
    context: Context,
    caller: BusyTrainer,
) -> CheckpointView:
    if isinstance(body, FailShard):
        return fail_shard(context, caller, checkpoint_id, rank, body)
    return _known(context, seal_shards(context, caller, checkpoint_id, {rank: body}))


@checkpoints_router.put(
    "/v1/checkpoints/{checkpoint_id}/shards", summary="Seal the shards of several ranks of one host, or none of them"
)
def seal_together(
    checkpoint_id: str,
    body: SealShards,
    context: Context,
    caller: BusyTrainer,
) -> CheckpointView:
    return _known(context, seal_shards(context, caller, checkpoint_id, {seal.rank: seal for seal in body.seals}))


def _known(context: ServiceContext, view: CheckpointView) -> CheckpointView:
    """Another process may have begun it: from now on this one knows whose turn its calls use."""
    context.load.note_checkpoint(view.id, view.project)
    return view


@checkpoints_router.post("/v1/checkpoints/{checkpoint_id}/abort", summary="Give a checkpoint up")
def abort(
    checkpoint_id: str,
    body: AbortCheckpoint,
    context: Context,
    caller: Trainer,
) -> CheckpointView:
    return abort_checkpoint(context, caller, checkpoint_id, body)


@checkpoints_router.get(
    "/v1/checkpoints/{checkpoint_id}", summary="Read a checkpoint, or wait until it is not uploading any more"
)
async def show(
    *,
    checkpoint_id: str,
    request: Request,
    response: Response,
    context: Context,
    caller: ReaderOrTrainer,
    wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="Seconds to wait for the outcome.")] = 0,
) -> CheckpointView:
    view = await on_a_thread(read_checkpoint, context, caller, checkpoint_id)
    if wait and view.state == CheckpointState.UPLOADING:
        permit: Permit = request.state.permit
        with permit.long_poll():
            await context.notifier.wait(checkpoint_id, wait)
        await permit.take()
        view = await on_a_thread(read_checkpoint, context, caller, checkpoint_id)
    return tagged(response, view)
