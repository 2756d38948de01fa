"""Audit events: who changed what, and why. Append-only.

`GET /v1/events`   filters -> Page[EventView]   (the newest first)
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from holdfast_protocol.base import Reply

ActorKind = Literal["person", "controller"]


class EventView(Reply):
    id: int = Field(description="Of its own; a larger one was begun later, though it may be written earlier.")
    at: datetime = Field(description="By the database's clock.")
    actor_kind: ActorKind
    actor: str = Field(description="The name of a person's token, or of a controller.")
    token_id: str | None
    action: str = Field(description="noun.verb", examples=["checkpoint.trash"])
    project: str | None
    run: str | None
    checkpoint_id: str | None
    step: int | None
    reason: str | None
    before: dict[str, Any] | None = Field(description="What changed, as it was.")
    after: dict[str, Any] | None = Field(description="What changed, as it is.")
