"""The fencing token that every write of a training job carries."""

from __future__ import annotations

from pydantic import Field

from holdfast_protocol.base import Request


class Fence(Request):
    """The fencing token: every write of a training job carries it. An older epoch or attempt is `stale_attempt`."""

    epoch: int = Field(ge=1, description="The catalog's epoch (protocol rule 5).")
    attempt: int = Field(ge=1)
