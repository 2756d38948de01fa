"""Checkpoints: begin, negotiate, seal, abort; read, edit and read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from holdfast_client.resources.base import Resource, all_items, if_match
from holdfast_client.transport import path
from holdfast_protocol.attempts import CheckpointDiff
from holdfast_protocol.base import Page
from holdfast_protocol.checkpoints import (
    AbortCheckpoint,
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointView,
    ChunksNegotiated,
    EditCheckpoint,
    FailShard,
    Manifest,
    MountProofOffer,
    NegotiateChunks,
    SealShard,
    SealShards,
    ShardChunks,
)
from holdfast_protocol.pruning import (
    PinCheckpoint,
    UndeleteCheckpoint,
)
from holdfast_protocol.restores import ChunkReads, ChunkVerdict, ReadChunks, ReportChunk, RestoreDecision
from holdfast_protocol.states import CheckpointState, Health


class Checkpoints(Resource):
    """See holdfast_protocol.checkpoints and holdfast_protocol.pruning."""

    def mount_proof(self) -> MountProofOffer:
        """A fresh file in the store's own filesystem; a client that can tell its content sees the same mount, and
        writes and reads chunks there."""
        return self.transport.call("POST", path("mount-proofs"), MountProofOffer)

    def begin(self, project: str, run: str, request: BeginCheckpoint) -> CheckpointBegun:
        """Begins a checkpoint; every rank may call it, the same begin gives the same checkpoint. With `offers` it is
        the first negotiation of their ranks too."""
        return self.transport.call(
            "POST", path("projects", project, "runs", run, "checkpoints"), CheckpointBegun, body=request
        )

    def negotiate(self, checkpoint_id: str, rank: int, request: NegotiateChunks) -> ChunksNegotiated:
        """Offers chunks and reports finished uploads. Most callers want `chunks.uploader.ShardUploader`."""
        route = path("checkpoints", checkpoint_id, "shards", rank, "chunks")
        return self.transport.call("POST", route, ChunksNegotiated, body=request)

    def seal(self, checkpoint_id: str, rank: int, request: SealShard | FailShard) -> CheckpointView:
        """Seals a rank's shard, or reports that it failed. The seal that completes the world commits."""
        return self.transport.call(
            "PUT", path("checkpoints", checkpoint_id, "shards", rank), CheckpointView, body=request
        )

    def seal_together(self, checkpoint_id: str, request: SealShards) -> CheckpointView:
        """Seals the shards of several ranks of one host, or none of them."""
        return self.transport.call("PUT", path("checkpoints", checkpoint_id, "shards"), CheckpointView, body=request)

    def abort(self, checkpoint_id: str, request: AbortCheckpoint) -> CheckpointView:
        return self.transport.call("POST", path("checkpoints", checkpoint_id, "abort"), CheckpointView, body=request)

    def get(self, checkpoint_id: str, wait_seconds: int | None = None) -> CheckpointView:
        """A checkpoint as it is; with `wait_seconds`, once it is no longer uploading or the time is over."""
        return self.transport.call(
            "GET",
            path("checkpoints", checkpoint_id),
            CheckpointView,
            params={"wait": wait_seconds},
            waits_seconds=wait_seconds or 0,
        )

    def select(self, project: str, run: str, selector: str) -> CheckpointView:
        """The checkpoint of the selector `latest`, `1200`, `1200#3`, `best:loss` or an id, whatever its state."""
        return self.transport.call(
            "GET", path("projects", project, "runs", run, "checkpoints", selector), CheckpointView
        )

    def list(
        self,
        project: str | None = None,
        run: str | None = None,
        *,
        state: CheckpointState | Sequence[CheckpointState] | None = None,
        health: Health | Sequence[Health] | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        committed_since: datetime | None = None,
        committed_before: datetime | None = None,
        label: str | None = None,
        attempt: int | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[CheckpointView]:
        """One page of a run's checkpoints, the largest step first. Without `run` those of all runs of the project,
        without `project` those of all projects that the token sees: run by run, in no order of the runs. `min_step`,
        `max_step` and `committed_since` are inclusive, `committed_before` is not."""
        if run is not None and project is None:
            raise ValueError("A run is named with its project: list(project, run).")
        of_run = () if run is None else ("runs", run)
        return self.transport.call(
            "GET",
            path(*(() if project is None else ("projects", project)), *of_run, "checkpoints"),
            Page[CheckpointView],
            params={
                "state": state,
                "health": health,
                "min_step": min_step,
                "max_step": max_step,
                "committed_since": None if committed_since is None else committed_since.isoformat(),
                "committed_before": None if committed_before is None else committed_before.isoformat(),
                "label": label,
                "attempt": attempt,
                "cursor": cursor,
                "limit": limit,
            },
        )

    def all(
        self,
        project: str | None = None,
        run: str | None = None,
        *,
        state: CheckpointState | Sequence[CheckpointState] | None = None,
        health: Health | Sequence[Health] | None = None,
        min_step: int | None = None,
        max_step: int | None = None,
        committed_since: datetime | None = None,
        committed_before: datetime | None = None,
        label: str | None = None,
        attempt: int | None = None,
    ) -> Iterator[CheckpointView]:
        """The checkpoints of all pages, read page by page as they are asked for."""
        return all_items(
            lambda cursor: self.list(
                project,
                run,
                state=state,
                health=health,
                min_step=min_step,
                max_step=max_step,
                committed_since=committed_since,
                committed_before=committed_before,
                label=label,
                attempt=attempt,
                cursor=cursor,
            )
        )

    def manifest(self, checkpoint_id: str) -> Manifest:
        return self.transport.call("GET", path("checkpoints", checkpoint_id, "manifest"), Manifest)

    def shard_chunks(self, checkpoint_id: str, rank: int) -> ShardChunks:
        return self.transport.call("GET", path("checkpoints", checkpoint_id, "shards", rank), ShardChunks)

    def diff(self, before_id: str, after_id: str) -> CheckpointDiff:
        """What the catalog knows of two whole checkpoints, side by side. `comparison.compare` tells of their tensors
        too."""
        route = path("checkpoints", after_id, "diff")
        return self.transport.call("GET", route, CheckpointDiff, params={"against": before_id})

    def edit(self, checkpoint_id: str, request: EditCheckpoint, etag: str) -> CheckpointView:
        """Edits labels, health or metrics: what the request was given. Raises EditConflict if the checkpoint is not the
        one that `etag` was read from."""
        return self.transport.call(
            "PATCH", path("checkpoints", checkpoint_id), CheckpointView, body=request, headers=if_match(etag)
        )

    def undelete(self, checkpoint_id: str, *, pin: bool | None = None) -> CheckpointView:
        """Takes a checkpoint back from the trash. `pin` None: a checkpoint that a policy had expired is pinned for a
        while, because it would expire again. Raises ChunkGone once its purge has begun."""
        return self.transport.call(
            "POST", path("checkpoints", checkpoint_id, "undelete"), CheckpointView, body=UndeleteCheckpoint(pin=pin)
        )

    def pin(
        self, checkpoint_id: str, reason: str, *, expires_in_seconds: int | None = None, etag: str | None = None
    ) -> CheckpointView:
        """Keeps a checkpoint from every policy and every prune, for ever or for so long. `etag`: of the checkpoint as
        the caller saw it, to replace another pin. Raises EditNeedsVersion and EditConflict."""
        request = PinCheckpoint(reason=reason, expires_in_seconds=expires_in_seconds)
        route = path("checkpoints", checkpoint_id, "pin")
        return self.transport.call("PUT", route, CheckpointView, body=request, headers=if_match(etag))

    def unpin(self, checkpoint_id: str, etag: str) -> CheckpointView:
        """Removes the pin that was read with `etag`; a checkpoint without one stays unchanged. Raises EditConflict."""
        route = path("checkpoints", checkpoint_id, "pin")
        return self.transport.call("DELETE", route, CheckpointView, headers=if_match(etag))


class Restores(Resource):
    """The restore point, and the reads of a restore."""

    def restore_point(
        self,
        project: str,
        run: str,
        selector: str = "latest",
        before_step: int | None = None,
        *,
        diverged: bool = False,
    ) -> RestoreDecision:
        """The checkpoint to restore now, and why newer ones are skipped. `before_step` excludes that step and later;
        with `diverged` a checkpoint that has diverged is accepted too."""
        return self.transport.call(
            "GET",
            path("projects", project, "runs", run, "restore-point"),
            RestoreDecision,
            params={"selector": selector, "before_step": before_step, "diverged": diverged or None},
        )

    def read_chunks(self, checkpoint_id: str, request: ReadChunks) -> ChunkReads:
        """Tickets to read chunks, under a lease. Most callers want `chunks.fetcher.ShardFetcher`."""
        return self.transport.call("POST", path("checkpoints", checkpoint_id, "reads"), ChunkReads, body=request)

    def release(self, lease_id: str) -> None:
        """Ends a lease. Without this call it expires by itself; until then no chunk under it can be purged."""
        self.transport.send("DELETE", path("read-leases", lease_id))

    def report_chunk(self, checkpoint_id: str, request: ReportChunk) -> ChunkVerdict:
        """Reports a chunk that could not be read; returns the service's own finding. The service reads up to a whole
        chunk for it, so the call has more time."""
        return self.transport.call(
            "POST", path("checkpoints", checkpoint_id, "chunk-reports"), ChunkVerdict, body=request, waits_seconds=120
        )
