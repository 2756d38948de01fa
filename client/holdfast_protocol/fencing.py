"""The fencing token that every write of a training job carries."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from holdfast_protocol.base import Request, since

LaunchId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class Fence(Request):
    """The fencing token: every write of a training job carries it. An older epoch or attempt is `stale_attempt`."""

    epoch: int = Field(ge=1, description="The catalog's epoch (protocol rule 5).")
    attempt: int = Field(ge=1)
    launch_id: LaunchId | None = Field(
        default=None,
        json_schema_extra=since(4),
        description="Of the launch that opened the attempt: a database that fails over to an older copy gives the "
        "number to another one. Null: a client of before 1.4, which is compared by its number alone.",
    )
