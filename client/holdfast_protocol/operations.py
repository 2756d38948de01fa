"""Long pieces of work that a person started: a worker of the service carries each out, and says how far it is.

`GET  /v1/operations`               ?project=&run=&kind=&state= -> Page[OperationView], the newest first
`GET  /v1/operations/{id}`                                      -> OperationView
`POST /v1/operations/{id}/cancel`                               -> OperationView

The call that starts one belongs to its kind, and answers with an OperationView. Repeated while the same is under way,
it answers with the one that is there.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from holdfast_protocol.base import Reply
from holdfast_protocol.states import OperationState


class OperationProgress(Reply):
    """How far it is, as its worker said last."""

    done: int | None = None
    total: int | None = Field(default=None, description="null: not known yet.")
    note: str | None = Field(default=None, description="What it is at, for people.")


class OperationView(Reply):
    id: str = Field(examples=["op_5f0c7d9f1f4b"])
    kind: str = Field(examples=["drill"])
    project: str | None = Field(description="null: it concerns the whole service.")
    run: str | None
    checkpoint_id: str | None
    arguments: dict[str, Any]
    state: OperationState
    progress: OperationProgress
    result: dict[str, Any] | None = Field(description="What came of it, by kind; null until it is done.")
    error: str | None = Field(description="Why it failed, was cancelled, or is tried again.")
    created_at: datetime
    created_by: str = Field(description="The name of the token.")
    started_at: datetime | None
    ended_at: datetime | None
    cancel_requested_at: datetime | None
    tries: int = Field(description="How often a worker began it: again when one was killed, or the store was away.")
