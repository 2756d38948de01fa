"""The foreground half of a save, on the training thread: capture -> plan -> vote -> stage; then the pipeline has it.

All ranks save, all decline, or all raise; whatever can fail on one rank alone comes before the vote, or is told to the
others through the service. The state may change again as soon as this returns. Where a window bounds the memory, the
pipeline starts first and takes the chunks while this stages them.
"""

from __future__ import annotations

import fnmatch
import logging
import operator
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import ConfigurationError, SaveDeclined
from holdfast.handle import SaveHandle
from holdfast.layout.plan import ChunkSizes, LocalPlan, build_local_plan, global_layout
from holdfast.metric_values import Metrics, metric_values
from holdfast.pipeline import SavePipeline
from holdfast.ranks import Ballot
from holdfast.save_job import SaveJob
from holdfast.session import Session
from holdfast.staging import StagedShard, StagingArea, WindowedShard
from holdfast.state.capture import CapturedState, capture
from holdfast.state.components import Declarations, path_of
from holdfast.state.finite import all_finite
from holdfast.state.rng import capture_rng
from holdfast.stats import SaveStats
from holdfast_client.chunks.workers import WorkerThreads
from holdfast_protocol.checkpoints import Component, MetricValue
from holdfast_protocol.index_documents import Layout, ShardIndex
from holdfast_protocol.states import CheckpointKind

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class _Captured:
    state: CapturedState
    rng: Any
    plan: LocalPlan
    metrics: dict[str, MetricValue] | None


def window_bytes(host_memory: int | None, sizes: ChunkSizes) -> int | None:
    """The size of the staging window. Raises ConfigurationError where the largest chunk has no room in it."""
    if host_memory is not None and host_memory < sizes.cut_bytes:
        raise ConfigurationError(
            f"host_memory is {host_memory} bytes, and a chunk has up to {sizes.cut_bytes}. "
            f"Give it {sizes.cut_bytes} at least; with three times that, copy and upload go on side by side."
        )
    return host_memory


class Saver:
    def __init__(
        self,
        session: Session,
        pipeline: SavePipeline,
        stats: SaveStats,
        *,
        declared: Declarations,
        sizes: ChunkSizes,
        check_finite: bool,
        window_bytes: int | None,
        helpers: WorkerThreads,
    ) -> None:
        """`helpers`: threads that have nothing to do while training waits for the copy."""
        self._session = session
        self._ranks = session.ranks
        self._pipeline = pipeline
        self._stats = stats
        self._declared = declared
        self._sizes = sizes
        self._check_finite = check_finite
        self._staging = StagingArea(window_bytes=window_bytes, helpers=helpers)
        self._number = 0
        self._plan: LocalPlan | None = None
        self._agreed: tuple[LocalPlan, Layout] | None = None

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Metrics | None, kind: CheckpointKind, *, wait: bool
    ) -> SaveHandle:
        """`wait`: for an earlier save that is in flight, half the ranks' time-out at most; else decline.

        A declined save's handle holds SaveDeclined. Raises on every rank where one rank's state cannot be saved.
        """
        began = time.monotonic()
        handle = SaveHandle(operator.index(step))
        self._session.ready_to_save()
        if wait:
            self._pipeline.wait_free(self._ranks.timeout_seconds / 2)
        captured, error = self._capture(state, metrics)
        unchanged = captured is not None and self._agreed is not None and captured.plan is self._agreed[0]
        verdict = self._ranks.vote(
            Ballot(
                handle.step,
                busy=self._pipeline.busy,
                failed=error is not None,
                layout_digest=self._agreed[1].digest if unchanged and self._agreed else None,
            )
        )
        if verdict.failed or captured is None:
            self._ranks.raise_together(error)
        if verdict.busy:
            return self._declined(handle, waited=wait)
        layout = self._agree(captured.plan, same=verdict.same_layout)
        self._number += 1
        self._start(self._job(handle, kind, captured, layout, state))
        self._stats.blocked_seconds += time.monotonic() - began
        return handle

    def forget_frozen(self) -> None:
        """The state was loaded anew: what is declared frozen is staged once more."""
        self._staging.forget_frozen()

    def close(self) -> None:
        """Gives the staging memory back, once no save reads it any more."""
        self._staging.close()

    def _capture(
        self, state: Mapping[str, Any], metrics: Metrics | None
    ) -> tuple[_Captured, None] | tuple[None, Exception]:
        try:
            if (ended_by := self._session.ended_by()) is not None:
                raise ended_by
            captured = capture(state, rank=self._ranks.rank, world_size=self._ranks.world_size, declared=self._declared)
            self._plan = build_local_plan(
                captured.specs,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                sizes=self._sizes,
                previous=self._plan,
            )
            values = metric_values(metrics) if metrics is not None and self._ranks.is_first else None
            return _Captured(captured, capture_rng(), self._plan, values), None
        except Exception as error:  # the other ranks are on their way into the vote, and must not wait for this one
            return None, error

    def _agree(self, plan: LocalPlan, *, same: bool) -> Layout:
        if not same or self._agreed is None:
            # Pure from here on: with the same plans every rank makes the same layout, or raises the same LayoutError.
            self._agreed = (plan, global_layout(self._ranks.gather(plan)))
            if self._ranks.is_first:
                _warn_of_idle_patterns(self._agreed[1], self._declared)
        return self._agreed[1]

    def _declined(self, handle: SaveHandle, *, waited: bool) -> SaveHandle:
        self._stats.declined += 1
        declined = SaveDeclined(f"Step {handle.step} is not saved: an earlier save is still in flight on some rank")
        # Of one that only comes a little later the schedule tells.
        if waited and self._ranks.is_first:
            log.warning("%s", declined)
        handle.fail(declined)
        return handle

    def _job(
        self, handle: SaveHandle, kind: CheckpointKind, captured: _Captured, layout: Layout, state: Mapping[str, Any]
    ) -> SaveJob:
        first = self._ranks.is_first
        index = ShardIndex(
            rank=self._ranks.rank,
            layout_digest=layout.digest,
            trees=captured.state.trees,
            replicated_trees=captured.state.replicated_trees if first else {},
            rng=captured.rng,
        )
        staged, finite = self._stage(captured, state)
        return SaveJob(
            number=self._number,
            step=handle.step,
            kind=kind,
            index=index,
            layout=layout,
            components=_components(captured.plan, state),
            finite=finite,
            metrics=captured.metrics,
            handle=handle,
            staged=staged,
        )

    def _start(self, job: SaveJob) -> None:
        windowed = job.staged if isinstance(job.staged, WindowedShard) else None
        if isinstance(job.staged, StagedShard) and windowed is None:
            job.handle.mark_staged()
        self._pipeline.start(job)
        if windowed is not None and windowed.fill():
            job.handle.mark_staged()

    def _stage(self, captured: _Captured, state: Mapping[str, Any]) -> tuple[StagedShard | Exception, bool]:
        """And whether this rank's part is finite, which is looked at only here: a save that is declined costs none."""
        try:
            finite = not self._check_finite or all_finite(captured.state, state)
            return self._staging.stage(captured.plan, captured.state.pieces), finite
        except Exception as error:  # after the vote: raising here would leave the others with a save that never ends
            return error, True


def _warn_of_idle_patterns(layout: Layout, declared: Declarations) -> None:
    paths = [path_of(name, entry.component) for name, entry in layout.tensors.items()]
    for pattern in declared.frozen:
        if not fnmatch.filter(paths, pattern):
            log.warning(
                "frozen=[%r] matches no tensor of the state, whose names are like %s",
                pattern,
                ", ".join(map(repr, paths[:3])) or "nothing: it has no tensors",
            )


def _components(plan: LocalPlan, state: Mapping[str, Any]) -> dict[str, Component]:
    """What the service lists of each component: its kind, and this rank's bytes of it."""
    stored: Counter[str] = Counter()
    for piece in plan.shard.pieces:
        stored[plan.tensors[piece.tensor].component] += sum(segment.bytes for segment in piece.segments)
    return {key: _component(key, value, stored[key]) for key, value in state.items()}


def _component(key: str, value: Any, logical_bytes: int) -> Component:
    if isinstance(value, torch.nn.Module):
        return Component(kind="model", logical_bytes=logical_bytes)
    if isinstance(value, torch.optim.Optimizer):
        return Component(kind="optimizer", logical_bytes=logical_bytes)
    if isinstance(value, LRScheduler):
        return Component(kind="lr_scheduler", logical_bytes=logical_bytes)
    return Component(kind="dataloader" if "loader" in key else "extra", logical_bytes=logical_bytes)
