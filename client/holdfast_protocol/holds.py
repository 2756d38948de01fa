"""Holds: what keeps a checkpoint from being taken away by anybody, until somebody else releases it.

`POST  /v1/checkpoints/{id}/holds`     PlaceHold    -> HoldView   (the same by the same token gives the one in force)
`GET   /v1/checkpoints/{id}/holds`                  -> Page[HoldView]
`GET   /v1/holds`                      filters      -> Page[HoldView]
`PATCH /v1/holds/{id}`                 ExtendHold   -> HoldView
`POST  /v1/holds/{id}/release`         ReleaseHold  -> HoldView
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import AwareDatetime, Field

from holdfast_protocol.base import Reply, Request


class HoldKind(StrEnum):
    LEGAL = "legal"
    """In force until it is released."""
    RETAIN_UNTIL = "retain_until"
    """In force until a point in time, which can only be moved further away, or until it is released."""


class PlaceHold(Request):
    reason: str = Field(min_length=1, max_length=1000, description="Others read it when they are refused.")
    retain_until: AwareDatetime | None = Field(
        default=None, description="In force until then, by the database's clock; null: until it is released."
    )
    mirror: bool = Field(
        default=False, description="Also by the store's Object Lock, on each copy of each chunk; S3 only."
    )


class ExtendHold(Request):
    retain_until: AwareDatetime = Field(description="Later than it is now: a hold is never shortened.")


class ReleaseHold(Request):
    reason: str = Field(min_length=1, max_length=1000)


class HoldView(Reply):
    id: str
    checkpoint_id: str
    project: str
    run: str
    step: int
    attempt: int
    kind: HoldKind
    reason: str
    retain_until: datetime | None
    in_force: bool
    mirror: bool
    mirrored_at: datetime | None = Field(
        description="Since when every copy in stores with Object Lock is locked; null: some are not, or it is over."
    )
    mirror_error: str | None = Field(description="Why the store did not lock a copy; it is tried again.")
    placed_at: datetime
    placed_by: str = Field(description="The name of the token.")
    released_at: datetime | None
    released_by: str | None
    release_reason: str | None
