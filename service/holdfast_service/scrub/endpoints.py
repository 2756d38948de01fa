"""Routes of scrubbing on demand, and of what a bad chunk means."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from holdfast_protocol.base import Digest, Page
from holdfast_protocol.copies import BadCopy, Impact, StartScrub
from holdfast_protocol.service import OperationView
from holdfast_service.context import Context
from holdfast_service.db.pages import DEFAULT_PAGE
from holdfast_service.scrub.impact import impact_of_checkpoint, impact_of_chunk, list_bad_copies
from holdfast_service.scrub.on_demand import scrub_checkpoint, scrub_run
from holdfast_service.web.frame import GuardedRoute
from holdfast_service.web.parameters import Cursor, IdempotencyKey, Limit, Operator, Reader

router = APIRouter(route_class=GuardedRoute, tags=["scrubs"])


@router.post(
    "/v1/projects/{project}/runs/{run}/scrubs", status_code=202, summary="Read every copy of a run's chunks again, now"
)
def start_for_run(
    project: str,
    run: str,
    body: StartScrub,
    *,
    context: Context,
    caller: Operator,
    idempotency_key: IdempotencyKey = None,
) -> OperationView:
    return scrub_run(context, caller, project, run, body, key=idempotency_key)


@router.post(
    "/v1/checkpoints/{checkpoint_id}/scrubs",
    status_code=202,
    summary="Read every copy of a checkpoint's chunks again, now",
)
def start_for_checkpoint(
    checkpoint_id: str, body: StartScrub, context: Context, caller: Operator, idempotency_key: IdempotencyKey = None
) -> OperationView:
    return scrub_checkpoint(context, caller, checkpoint_id, body, idempotency_key)


@router.get(
    "/v1/chunks/{digest}/impact",
    name="impact_of_chunk",
    summary="A chunk's copies, and which checkpoints and runs need it",
)
def of_chunk(
    digest: Annotated[Digest, Path(description="The chunk's SHA-256.")], context: Context, caller: Reader
) -> Impact:
    return impact_of_chunk(context, caller, digest)


@router.get(
    "/v1/checkpoints/{checkpoint_id}/impact",
    name="impact_of_checkpoint",
    summary="Its bad chunks, and who else needs them",
)
def of_checkpoint(checkpoint_id: str, context: Context, caller: Reader) -> Impact:
    return impact_of_checkpoint(context, caller, checkpoint_id)


@router.get(
    "/v1/projects/{project}/bad-copies", name="list_bad_copies", summary="List every copy that is bad or suspect"
)
def bad_copies(
    project: str,
    context: Context,
    caller: Reader,
    cursor: Cursor = None,
    limit: Limit = DEFAULT_PAGE,
) -> Page[BadCopy]:
    return list_bad_copies(context, caller, project, cursor=cursor, limit=limit)
