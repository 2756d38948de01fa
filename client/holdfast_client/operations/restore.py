"""Which checkpoint can be restored, and tickets to read its chunks. See holdfast_protocol.restore."""

from __future__ import annotations

from holdfast_client.operations.base import Operations
from holdfast_client.transport import path
from holdfast_protocol.restore import ChunkReads, ChunkVerdict, ReadChunks, ReportChunk, RestoreDecision


class RestoreOperations(Operations):
    def restore_point(
        self,
        project: str,
        run: str,
        selector: str = "latest",
        before_step: int | None = None,
        *,
        diverged: bool = False,
    ) -> RestoreDecision:
        """The checkpoint to restore now and why newer ones are not it. `before_step` excludes that step and later;
        with `diverged` a checkpoint that has diverged will do as well."""
        return self.transport.call(
            "GET",
            path("projects", project, "runs", run, "restore-point"),
            RestoreDecision,
            params={"selector": selector, "before_step": before_step, "diverged": diverged or None},
        )

    def read_chunks(self, checkpoint_id: str, request: ReadChunks) -> ChunkReads:
        """Tickets to read chunks, under a lease. Most callers want `chunks.fetcher.ShardFetcher`."""
        return self.transport.call("POST", path("checkpoints", checkpoint_id, "reads"), ChunkReads, body=request)

    def release_reads(self, lease_id: str) -> None:
        """Ends a lease. It would run out by itself; until then nothing under it can be purged."""
        self.transport.send("DELETE", path("read-leases", lease_id))

    def report_chunk(self, checkpoint_id: str, request: ReportChunk) -> ChunkVerdict:
        """Reports a chunk that could not be read; the service reads it itself and says what it found.
        The service reads up to a whole chunk for this, which is given more time."""
        return self.transport.call(
            "POST", path("checkpoints", checkpoint_id, "chunk-reports"), ChunkVerdict, body=request, waits_seconds=120
        )
