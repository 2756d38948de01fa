"""What the routes share: who may call, the parameters of lists and of edits, and the reply's status and ETag."""

from __future__ import annotations

from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Header, Query, Response
from pydantic import AwareDatetime, BaseModel, BeforeValidator

from holdfast_protocol.base import PROTOCOL_HEADER, PROTOCOL_MAJOR
from holdfast_protocol.states import Scope
from holdfast_service.auth.principal import Principal, require
from holdfast_service.db.pages import MAX_PAGE

AnyCaller = Annotated[Principal, require(None)]
SigningIn = Annotated[Principal, require(None, takes_code=True)]
Reader = Annotated[Principal, require(Scope.READ)]
ReaderOrTrainer = Annotated[Principal, require(Scope.READ, or_scope=Scope.TRAIN)]
"""A job looks at its own attempts and checkpoints."""
Trainer = Annotated[Principal, require(Scope.TRAIN)]
BusyTrainer = Annotated[Principal, require(Scope.TRAIN, work_looks=True)]
"""For the calls that every rank makes for every checkpoint: their work begins with `lock_run` or `begin_writing`."""
Operator = Annotated[Principal, require(Scope.OPERATE)]
Admin = Annotated[Principal, require(Scope.ADMIN)]
PlatformReader = Annotated[Principal, require(Scope.READ, every_project=True)]
PlatformOperator = Annotated[Principal, require(Scope.OPERATE, every_project=True)]
PlatformAdmin = Annotated[Principal, require(Scope.ADMIN, every_project=True)]
"""For what concerns all projects at once: none of them has a say in it."""

Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Items of a page, at most.")]
IfMatch = Annotated[
    str | None,
    Header(max_length=200, description="The `etag` that was seen, or * for any. Without it: 428."),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="Any text of the client's own. The same call with the same key makes nothing twice.",
    ),
]
ProtocolSpoken = Annotated[
    str,
    Header(alias=PROTOCOL_HEADER, pattern=rf"^{PROTOCOL_MAJOR}\.[0-9]{{1,6}}$", description="The client's version."),
]


def _written_out(value: str) -> str:
    if value.replace(".", "", 1).lstrip("+-").isdecimal():
        raise ValueError("write a date and a time with its zone, such as 2026-11-23T10:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_written_out)]
"""A query's moment. pydantic would take a number for seconds since 1970, which OpenAPI's `date-time` is not."""


class _Versioned(Protocol):
    @property
    def etag(self) -> str: ...


ViewT = TypeVar("ViewT", bound=_Versioned)


def tagged(response: Response, view: ViewT) -> ViewT:
    """The same view. Its `etag` becomes the reply's ETag."""
    response.headers["ETag"] = view.etag
    return view


def or_made(view: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For `responses=` of a PUT: beside 200 for what was there, 201 for what the call has made."""
    return {201: {"model": view, "description": "This call has made it."}}


def made(response: Response, *, is_new: bool) -> None:
    """201 for what this call has made, 200 for what was there."""
    response.status_code = 201 if is_new else 200
