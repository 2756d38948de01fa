"""A sample object: shows that a client reaches the store, and leaves nothing behind. `holdfast doctor` sends one.

`POST   /v1/store-samples`              MakeSample -> SampleOffer
`POST   /v1/store-samples/{id}/checks`             -> SampleChecked
`DELETE /v1/store-samples/{id}`

It belongs to no project and no run, and stands in no table. Its id is a secret of whoever made it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from holdfast_protocol.base import Digest, Reply, Request
from holdfast_protocol.chunks import UploadTicket
from holdfast_protocol.restore import ReadTicket

MAX_SAMPLE_BYTES = 1024 * 1024


class MakeSample(Request):
    digest: Digest = Field(description="SHA-256 of the sample's bytes.")
    bytes: int = Field(ge=1, le=MAX_SAMPLE_BYTES)
    md5: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None = None


class SampleOffer(Reply):
    id: str
    ticket: UploadTicket


class SampleChecked(Reply):
    """The store has the sample, with the size that was announced."""

    hashed_by_store: bool = Field(description="The store itself says the right SHA-256.")
    ticket: ReadTicket
