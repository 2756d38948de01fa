"""What a training job calls: attempts, from their opening to their end; checkpoints, from begin to commit or abort; and
what a restore reads. People read and edit them here too. See holdfast_protocol.attempts, .checkpoints and .restores.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from pydantic import JsonValue

from holdfast_client.errors import AttemptConflict, NotFound, StaleAttempt
from holdfast_client.resources.base import Resource, all_items, if_match, once
from holdfast_client.transport import path
from holdfast_protocol.attempts import (
    AttemptOpened,
    AttemptView,
    CheckpointDiff,
    ConfigView,
    EndAttempt,
    Heartbeat,
    HeartbeatReply,
    OpenAttempt,
    ResumedFrom,
)
from holdfast_protocol.base import Page, RunName
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
from holdfast_protocol.comparison.values import CompareValues
from holdfast_protocol.pruning import (
    PinCheckpoint,
    UndeleteCheckpoint,
)
from holdfast_protocol.restores import ChunkReads, ChunkVerdict, ReadChunks, ReportChunk, RestoreDecision
from holdfast_protocol.service import OperationView
from holdfast_protocol.states import CheckpointState, Health

log = logging.getLogger("holdfast.client")

_TRIES = 5


class Attempts(Resource):
    """Launches of a job. See holdfast_protocol.attempts."""

    def open(self, project: str, run: str, request: OpenAttempt) -> AttemptOpened:
        """Opens an attempt and fences every older one. Most callers want `open_next`, which also reads
        the newest number. Raises AttemptConflict if `after` is not the newest."""
        return self.transport.call(
            "POST", path("projects", project, "runs", run, "attempts"), AttemptOpened, body=request
        )

    def list(self, project: str, run: str, *, cursor: str | None = None, limit: int | None = None) -> Page[AttemptView]:
        """One page of a run's attempts, newest first."""
        return self.transport.call(
            "GET",
            path("projects", project, "runs", run, "attempts"),
            Page[AttemptView],
            params={"cursor": cursor, "limit": limit},
        )

    def all(self, project: str, run: str) -> Iterator[AttemptView]:
        """The attempts of all pages, newest first."""
        return all_items(lambda cursor: self.list(project, run, cursor=cursor))

    def get(self, project: str, run: str, number: int) -> AttemptView:
        return self.transport.call("GET", path("projects", project, "runs", run, "attempts", number), AttemptView)

    def config(self, project: str, run: str, number: int, *, against: int | None = None) -> ConfigView:
        """What the job was told to train, and what is another than in the attempt `against`, or else in the newest one
        before that gave a configuration."""
        route = path("projects", project, "runs", run, "attempts", number, "config")
        return self.transport.call("GET", route, ConfigView, params={"against": against})

    def resumed_from(self, project: str, run: str, number: int, request: ResumedFrom) -> AttemptView:
        """Reports the checkpoint that the ranks have really loaded; the lineage follows it."""
        route = path("projects", project, "runs", run, "attempts", number, "resumed-from")
        return self.transport.call("PUT", route, AttemptView, body=request)

    def heartbeat(self, project: str, run: str, number: int, request: Heartbeat) -> HeartbeatReply:
        """Reports that the attempt is alive. Raises StaleAttempt if it was fenced."""
        route = path("projects", project, "runs", run, "attempts", number, "heartbeat")
        return self.transport.call("POST", route, HeartbeatReply, body=request)

    def end(self, project: str, run: str, number: int, request: EndAttempt) -> AttemptView:
        route = path("projects", project, "runs", run, "attempts", number, "end")
        return self.transport.call("POST", route, AttemptView, body=request)

    def open_next(
        self,
        run_name: RunName,
        launch_id: str,
        *,
        world_size: int,
        host: str = "",
        environment: dict[str, str] | None = None,
        create: bool | None = None,
        config: Mapping[str, JsonValue] | None = None,
        after: int | None = None,
    ) -> AttemptOpened:
        """Opens an attempt after the newest one (rule attempt-compare-and-swap). Rank 0 calls it. With `after` no other
        attempt than this one may be the newest; else it raises AttemptConflict, and fences nothing.

        A later launch wins over an earlier one, but a late retry of an earlier launch must not fence its successor. If
        this launch's opening may have been carried out, and another attempt is newer now, that one is the successor,
        and this launch stops. Raises StaleAttempt if a later launch has taken over in between, RunNotFound or
        ProjectNotFound if they may not be made (see OpenAttempt.create)."""
        known = self._newest(run_name) if after is None else after
        for tries_left in reversed(range(_TRIES)):
            request = OpenAttempt(
                launch_id=launch_id,
                after=known,
                world_size=world_size,
                host=host,
                environment=environment or {},
                create=create,
                config=None if config is None else dict(config),
            )
            try:
                return self.open(run_name.project, run_name.run, request)
            except AttemptConflict as conflict:
                if conflict.earlier_try_ambiguous:
                    raise StaleAttempt(
                        f"Launch {launch_id} of {run_name} lost the reply to its opening, and a later attempt is open "
                        "now",
                        request_id=conflict.request_id,
                        context=conflict.context,
                    ) from conflict
                if after is not None or not tries_left:
                    raise
                known = self._newest(run_name)
                log.info("another attempt of %s was opened in between; opening after %d", run_name, known)
        raise AssertionError("the last try returns or raises")

    def _newest(self, run_name: RunName) -> int:
        """0 if there is none yet. Even a token that may only train can list attempts."""
        try:
            newest_first = self.list(run_name.project, run_name.run, limit=1).items
        except NotFound:
            return 0
        return newest_first[0].number if newest_first else 0


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
        too, and `compare_values` how far apart they are."""
        route = path("checkpoints", after_id, "diff")
        return self.transport.call("GET", route, CheckpointDiff, params={"against": before_id})

    def compare_values(
        self, before_id: str, after_id: str, *, most_tensors: int = 100, dry_run: bool = False
    ) -> OperationView:
        """Has a worker read the tensors that differ, and measure how far apart they are. `operations.wait` gives the
        result, a ValuesCompared."""
        request = CompareValues(against=before_id, most_tensors=most_tensors, dry_run=dry_run)
        route = path("checkpoints", after_id, "comparisons")
        return self.transport.call("POST", route, OperationView, body=request, headers=once())

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
