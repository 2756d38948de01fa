"""Routes of attempts, under `/v1/projects/{project}/runs/{run}/attempts`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query

from holdfast_protocol.attempts import (
    AttemptOpened,
    AttemptView,
    EndAttempt,
    Heartbeat,
    HeartbeatReply,
    OpenAttempt,
    ResumedFrom,
)
from holdfast_protocol.base import Name, Page
from holdfast_protocol.problems import ProblemCode
from holdfast_protocol.states import Scope
from holdfast_protocol.version import PROTOCOL_HEADER, PROTOCOL_VERSION, minor_of
from holdfast_service.attempts.end import end_attempt
from holdfast_service.attempts.heartbeat import take_heartbeat
from holdfast_service.attempts.open import open_attempt
from holdfast_service.attempts.read import list_attempts, read_attempt
from holdfast_service.attempts.resumed_from import record_resumed_from
from holdfast_service.auth.principal import Principal
from holdfast_service.auth.require import require
from holdfast_service.catalog.restore_choice import known_to
from holdfast_service.context import Context
from holdfast_service.errors import ProblemError
from holdfast_service.web.guarded_route import GuardedRoute

router = APIRouter(route_class=GuardedRoute, prefix="/v1/projects/{project}/runs/{run}/attempts", tags=["attempts"])

Trainer = Annotated[Principal, require(Scope.TRAIN)]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]


@router.post("", summary="Open an attempt; every older one is fenced")
def open_(
    *,
    project: Name,
    run: Name,
    body: OpenAttempt,
    context: Context,
    caller: Trainer,
    spoken: Annotated[str, Header(alias=PROTOCOL_HEADER, description="The client's version.")] = PROTOCOL_VERSION,
) -> AttemptOpened:
    opened = open_attempt(context, caller, project, run, body)
    return opened.model_copy(update={"passed_over": known_to(opened.passed_over, minor_of(spoken))})


@router.get("", summary="List the attempts of a run, the newest first")
def list_(
    project: str,
    run: str,
    context: Context,
    caller: Annotated[Principal, require(None)],
    *,
    cursor: Annotated[str | None, Query(max_length=500)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> Page[AttemptView]:
    return list_attempts(context, caller, project, run, cursor=cursor, limit=limit)


@router.get("/{number}", summary="Read an attempt")
def read(
    project: str, run: str, number: Number, context: Context, caller: Annotated[Principal, require(None)]
) -> AttemptView:
    return read_attempt(context, caller, project, run, number)


@router.put("/{number}/resumed-from", summary="Say what the ranks have really loaded")
def resumed_from(
    project: str, run: str, number: Number, body: ResumedFrom, *, context: Context, caller: Trainer
) -> AttemptView:
    _refuse_other_number(number, body.attempt)
    return record_resumed_from(context, caller, project, run, body)


@router.post("/{number}/heartbeat", summary="Say that the attempt is alive")
def heartbeat(
    project: str, run: str, number: Number, body: Heartbeat, *, context: Context, caller: Trainer
) -> HeartbeatReply:
    _refuse_other_number(number, body.attempt)
    return take_heartbeat(context, caller, project, run, body)


@router.post("/{number}/end", summary="Say how the attempt ended")
def end(project: str, run: str, number: Number, body: EndAttempt, *, context: Context, caller: Trainer) -> AttemptView:
    _refuse_other_number(number, body.attempt)
    return end_attempt(context, caller, project, run, body)


def _refuse_other_number(in_path: int, in_body: int) -> None:
    if in_path != in_body:
        raise ProblemError(
            ProblemCode.INVALID_REQUEST,
            f"The path names attempt {in_path} and the body attempt {in_body}. Give the same number in both.",
        )
