"""Sample objects. See holdfast_protocol.samples."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.samples import MakeSample, SampleChecked, SampleOffer


class SampleOperations(Operations):
    def make_sample(self, request: MakeSample) -> SampleOffer:
        return self.transport.call("POST", path("store-samples"), SampleOffer, body=request)

    def check_sample(self, sample_id: str) -> SampleChecked:
        """Raises ChunkGone where it has not arrived."""
        return self.transport.call("POST", path("store-samples", sample_id, "checks"), SampleChecked)

    def delete_sample(self, sample_id: str) -> None:
        self.transport.send("DELETE", path("store-samples", sample_id))
