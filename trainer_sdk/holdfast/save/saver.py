"""The foreground half of a save, on the training thread: capture -> plan -> vote -> stage; then the pipeline has it.

All ranks save, all decline, or all raise: a step that can fail on one rank alone comes before the vote, or the service
tells the others. The state may change again as soon as save() returns; with `overlap`, the next step of an optimizer
waits for what is still copied (staging/overlap.py). If a window bounds the memory, the pipeline starts first and takes
the chunks while this stages them.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import LRScheduler

from holdfast.distributed.ranks import Ballot, Question
from holdfast.errors import ConfigurationError, MissingComponent, SaveDeclined, StateError
from holdfast.health.diverged import FiniteCheck, HealthJudge, Looked, both_verdicts, first_reasons, verdict_on
from holdfast.layout.plan import ChunkSizes, LocalPlan, build_local_plan, global_layout
from holdfast.save.job import SaveHandle, SaveJob, SaveState, SaveStats, Standstill
from holdfast.save.pipeline import SavePipeline
from holdfast.session.session import Session
from holdfast.staging import StagedShard, StagingArea, WindowedShard
from holdfast.state.capture import CapturedState, Described, capture
from holdfast.state.components import HF_FILES, Declarations, capture_rng, path_of
from holdfast.state.replicas import check_components, check_optimizers, first_difference, shared_by
from holdfast_client.agent.link import NodeAgent
from holdfast_client.chunks.workers import WorkerThreads
from holdfast_protocol.checkpoints import MAX_METRICS, Component, HealthVerdict, MetricValue, ShardSummary
from holdfast_protocol.index_documents import Layout, SavedAs, ShardIndex
from holdfast_protocol.states import CheckpointKind
from holdfast_protocol.text import is_text

Metrics = Mapping[str, Any]
"""Names of at most 100 letters -> numbers, or tensors with one element."""


def metric_values(metrics: Metrics) -> dict[str, MetricValue]:
    """Raises TypeError, which names the metric. Reading a tensor waits for its device: call this only to save."""
    if len(metrics) > MAX_METRICS:
        raise TypeError(f"there are {len(metrics)} metrics, and {MAX_METRICS} are the most; leave some out")
    values = {}
    for name, value in metrics.items():
        if not (isinstance(name, str) and 1 <= len(name) <= 100 and is_text(name, one_line=True)):
            raise TypeError(f"the metric name {name!r:.120} is not usable; give text of 1 to 100 letters in one line")
        values[name] = MetricValue.of(number_of(name, value))
    return values


def number_of(name: str, value: Any) -> float:
    """Raises TypeError, which names the metric."""
    try:
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"metrics[{name!r}] is a {type(value).__name__}, not one number; give a float or a one-element tensor"
        ) from error


log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class _Agreed:
    """What all ranks have voted to save."""

    captured: _Captured
    layout: Layout
    number: int
    """The save's number in this job, the same on all ranks."""


@dataclass(frozen=True)
class _Captured:
    state: CapturedState
    rng: Any
    plan: LocalPlan
    summary: ShardSummary
    """Without the verdict."""


def window_bytes(host_memory: int | None, sizes: ChunkSizes) -> int | None:
    """Bytes of the staging window. Raises ConfigurationError if the largest chunk does not fit into it."""
    if host_memory is not None and host_memory < sizes.cut_bytes:
        raise ConfigurationError(
            f"host_memory is {host_memory} bytes, and a chunk has up to {sizes.cut_bytes}. "
            f"Give it {sizes.cut_bytes} at least; with three times that, copy and upload go on side by side."
        )
    return host_memory


class Completeness:
    """Warns of components of the run's first checkpoint that the state lacks, or raises with `strict`: a scheduler that
    a script forgot to pass on is missed only at the resume that needs it. The components of all ranks count together,
    because one rank may have components that the others lack.

    One job's. The run's first checkpoint is this job's own if none was committed before."""

    def __init__(self, *, drop: Iterable[str], strict: bool, speaks: bool) -> None:
        """`drop`: components that are left out on purpose. `speaks`: on rank 0."""
        self._dropped = frozenset(drop)
        self._strict = strict
        self._speaks = speaks
        self._declared: frozenset[str] | None = None
        self._said: set[frozenset[str]] = set()

    def left_out(self, declared: Iterable[str]) -> frozenset[str]:
        """What need not be there: `drop`, and config and tokenizer that an import brought, as no job resumes from
        these."""
        return self._dropped | ({HF_FILES} & set(declared))

    def check(self, has: Iterable[str], declared: Iterable[str]) -> None:
        """`has`: of all ranks; `declared`: by the service, empty before the first commit. The same on all ranks. Raises
        MissingComponent with `strict`; else each set of them is logged once."""
        has = frozenset(has)
        if self._declared is None:
            self._declared = frozenset(declared) or has
        missing = self._declared - has - self.left_out(self._declared)
        if not missing or missing in self._said:
            return
        names = ", ".join(map(repr, sorted(missing)))
        what = f"The state lacks {names}, which the first checkpoint of this run has"
        if self._strict:
            raise MissingComponent(what)
        self._said.add(missing)
        if self._speaks:
            log.warning("%s. It is saved without. %s", what, MissingComponent.remedy)


class Saver:
    def __init__(
        self,
        session: Session,
        pipeline: SavePipeline,
        stats: SaveStats,
        *,
        declared: Declarations,
        sizes: ChunkSizes,
        check_finite: bool | None,
        judge: HealthJudge,
        completeness: Completeness,
        window_bytes: int | None,
        overlap: bool,
        helpers: WorkerThreads,
        agent: NodeAgent | None = None,
    ) -> None:
        """`helpers`: threads that are idle while training waits for the copy. `agent`: can read what is staged."""
        self._session = session
        self._ranks = session.ranks
        self._pipeline = pipeline
        self._stats = stats
        self._declared = declared
        self._sizes = sizes
        self._finite = FiniteCheck.asked_for(check_finite)
        self._judge = judge
        self._completeness = completeness
        self._staging = StagingArea(
            window_bytes=window_bytes,
            helpers=helpers,
            overlap=overlap,
            waiting=session.progress.saving,
            agent=agent,
        )
        self._number = 0
        self._described: Mapping[str, Described] = {}
        self._plan: LocalPlan | None = None
        self._agreed: tuple[LocalPlan, Layout] | None = None
        self._components: tuple[str, ...] = ()
        """Bytes of this rank's state, when the layout was agreed on."""

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Metrics | None, kind: CheckpointKind, *, wait: bool
    ) -> SaveHandle:
        """`wait`: for an earlier save in flight, at most half the ranks' time-out; without it, decline.

        A declined save's handle holds SaveDeclined. Raises on every rank if one rank's state cannot be saved.
        """
        with self._session.progress.saving():
            return self._save(step, state, metrics, kind, wait=wait)

    def _save(
        self, step: int, state: Mapping[str, Any], metrics: Metrics | None, kind: CheckpointKind, *, wait: bool
    ) -> SaveHandle:
        began = time.monotonic()
        handle = SaveHandle(operator.index(step))
        self._session.open()
        if wait:
            self._pipeline.wait_free(self._ranks.timeout_seconds / 2)
        standstill = Standstill()
        agreed = self._vote(handle.step, state, metrics, busy=self._pipeline.busy)
        if agreed is None:
            return self._declined(handle, waited=wait)
        self._session.progress.saves_begun += 1
        job = self._job(handle, kind, agreed, state, area=self._staging, standstill=standstill)
        self._start(job)
        self._agree_on_health(job)
        standstill.end()
        self._stats.blocked(time.monotonic() - began)
        return handle

    def stage_apart(self, step: int, state: Mapping[str, Any], metrics: Metrics | None, area: StagingArea) -> SaveJob:
        """Stages into memory of its own, and starts nothing: the caller has the job. Raises as save() does."""
        with self._session.progress.saving():
            began, standstill = time.monotonic(), Standstill()
            handle = SaveHandle(operator.index(step))
            agreed = self._vote(handle.step, state, metrics, busy=False)
            if agreed is None:
                raise AssertionError("no rank is busy")
            job = self._job(handle, CheckpointKind.EMERGENCY, agreed, state, area=area, standstill=standstill)
            job.handle.become(SaveState.STAGED)
            standstill.end()
            self._stats.blocked(time.monotonic() - began)
            return dataclasses.replace(job, has_own_memory=True)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Before the first save: a thread makes the memory that a state like this takes. Not a collective. No object's
        own state_dict() is called, because the script does not expect that yet: what those bring must find room in a
        small reserve. A state that cannot be saved is the save's to refuse."""
        asked = {key: value for key, value in state.items() if not _has_own_form(value)}
        with suppress(Exception):
            self._staging.prepare(self._planned(asked)[1])

    def forget_frozen(self) -> None:
        """The state was loaded again: tensors that are declared frozen are staged once more."""
        self._staging.forget_frozen()
        if self._finite is not None:
            self._finite.forget()

    def wait_for_copies(self) -> None:
        """Before the state is loaded again: a copy of the last save may still read it."""
        self._staging.wait_for_copies()

    def close(self) -> None:
        """Releases the staging memory once no save reads it any more."""
        self._staging.close()

    def _vote(self, step: int, state: Mapping[str, Any], metrics: Metrics | None, *, busy: bool) -> _Agreed | None:
        """None if any rank is busy; then all ranks have voted alike, and none goes on."""
        captured, error = self._capture(state, metrics, busy=busy)
        unchanged = captured is not None and self._is_as_agreed(captured)
        verdict = self._ranks.vote(
            Ballot(
                step,
                busy=busy,
                failed=error is not None,
                layout_digest=self._agreed[1].digest if unchanged and self._agreed else None,
            )
        )
        if verdict.failed:
            self._ranks.raise_together(error)
        if verdict.busy or captured is None:
            return None
        layout = self._agree(captured, same=verdict.same_layout)
        self._number += 1
        return _Agreed(captured, layout, self._number)

    def _capture(
        self, state: Mapping[str, Any], metrics: Metrics | None, *, busy: bool
    ) -> tuple[_Captured | None, Exception | None]:
        """Nothing if this rank is busy: all will decline."""
        try:
            if (ended_by := self._session.ended_by()) is not None:
                raise ended_by
            self._session.ready_to_save()
            if busy:
                return None, None
            captured, plan = self._planned(state)
            return _Captured(captured, capture_rng(), plan, self._summary(plan, state, metrics)), None
        except Exception as error:  # the other ranks are on their way into the vote, and must not wait for this one
            return None, error

    def _planned(self, state: Mapping[str, Any]) -> tuple[CapturedState, LocalPlan]:
        rank, world_size = self._ranks.rank, self._ranks.world_size
        captured = capture(state, rank=rank, world_size=world_size, declared=self._declared, before=self._described)
        self._described = captured.described
        self._plan = build_local_plan(
            captured.specs, rank=rank, world_size=world_size, sizes=self._sizes, previous=self._plan
        )
        return captured, self._plan

    def _summary(self, plan: LocalPlan, state: Mapping[str, Any], metrics: Metrics | None) -> ShardSummary:
        """Without the verdict. Raises StateError: the service would take no other summary, and the vote is to come."""
        first = self._ranks.is_first
        try:
            return ShardSummary(
                components=_components(plan, state),
                metrics=metric_values(metrics) if metrics is not None and first else None,
                dropped_components=sorted(self._completeness.left_out(self._session.opened.components))
                if first
                else [],
            )
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"]))
            raise StateError(f"the service cannot take {where:.80} of this save: {wrong['msg']}") from None

    def _is_as_agreed(self, captured: _Captured) -> bool:
        same_plan = self._agreed is not None and captured.plan is self._agreed[0]
        return same_plan and captured.state.components == self._components

    def _agree(self, captured: _Captured, *, same: bool) -> Layout:
        if not same or self._agreed is None:
            plan, components = captured.plan, captured.state.components
            told = self._ranks.together(lambda: (plan, components, shared_by(captured.state)))
            # Pure from here on: with the same plans every rank makes the same layout, or raises the same LayoutError.
            self._completeness.check((name for _, names, _ in told for name in names), self._session.opened.components)
            check_optimizers([shared.optimized for _, _, shared in told])
            check_components([shared.components for _, _, shared in told])
            self._agreed = (plan, global_layout([each for each, _, _ in told]))
            self._components = components
            if self._ranks.is_first:
                _warn_of_idle_patterns(self._agreed[1], self._declared)
                _warn_of_difference(first_difference([shared.marks for _, _, shared in told]))
        return self._agreed[1]

    def _declined(self, handle: SaveHandle, *, waited: bool) -> SaveHandle:
        self._stats.declined += 1
        declined = SaveDeclined(f"Step {handle.step} is not saved: an earlier save is still in flight on some rank")
        # The schedule reports a save that only comes a little later.
        if waited and self._ranks.is_first:
            log.warning("%s", declined)
        handle.fail(declined)
        return handle

    def _job(
        self,
        handle: SaveHandle,
        kind: CheckpointKind,
        agreed: _Agreed,
        state: Mapping[str, Any],
        *,
        area: StagingArea,
        standstill: Standstill,
    ) -> SaveJob:
        first = self._ranks.is_first
        captured, layout = agreed.captured, agreed.layout
        # Before anything is staged: it is the script's own rule, and may be interrupted.
        own = self._judge.judge(handle.step, captured.summary.metrics) if first else None
        index = ShardIndex(
            SavedAs(str(self._session.run), handle.step, layout.world_size),
            rank=self._ranks.rank,
            layout_digest=layout.digest,
            trees=captured.state.trees,
            replicated_trees=captured.state.replicated_trees if first else {},
            rng=captured.rng,
        )
        staged, verdict = self._stage(captured, state, area)
        if own is not None:
            verdict = own if verdict is None else both_verdicts(verdict, own)
        # An older service knows only `finite` of the verdict.
        told = {"finite": verdict is None or verdict.healthy, "verdict": verdict}
        return SaveJob(
            number=agreed.number,
            step=handle.step,
            kind=kind,
            index=index,
            layout=layout,
            summary=captured.summary.model_copy(update=told),
            handle=handle,
            standstill=standstill,
            staged=staged,
        )

    def _start(self, job: SaveJob) -> None:
        windowed = job.staged if isinstance(job.staged, WindowedShard) else None
        is_whole = isinstance(job.staged, StagedShard) and windowed is None and job.staged.late is None
        try:
            if is_whole:
                job = self._pipeline.hand_over(job)
        finally:  # even after Ctrl-C: all ranks have voted for this save, and it has the memory of the next one
            if is_whole:
                job.handle.become(SaveState.STAGED)
            self._pipeline.start(job)
        if windowed is not None and windowed.fill():
            job.handle.mark_staged()

    def _stage(
        self, captured: _Captured, state: Mapping[str, Any], area: StagingArea
    ) -> tuple[StagedShard | Exception, HealthVerdict | None]:
        """Also returns what is wrong with this rank's part. It is checked only here: a declined save costs no check."""
        looked: list[Looked] = []
        plan, pieces, check = captured.plan, captured.state.pieces, self._finite
        try:
            if check is None:
                return area.stage(plan, pieces), None
            staged = area.stage(plan, pieces, meanwhile=lambda: looked.append(check.look(plan, pieces, state)))
            try:
                return staged, verdict_on(check.found(looked[0]))
            except BaseException:
                staged.release()
                raise
        except Exception as error:  # after the vote: raising here would leave the others with a save that never ends
            return error, None

    def _agree_on_health(self, job: SaveJob) -> None:
        """Every rank learns what any rank has found: either all ranks go back, or none."""
        verdict = job.summary.verdict
        own = verdict.reason if verdict is not None and not verdict.healthy else None
        ballot = Ballot(job.step, busy=False, failed=False, layout_digest=None, question=Question.IS_DIVERGED)
        if not self._ranks.vote(dataclasses.replace(ballot, yes=own is not None)).yes:
            return
        reason = first_reasons([each for each in self._ranks.gather(own) if each])
        job.handle.diverged = reason
        self._stats.diverged += 1
        if self._ranks.is_first:
            log.warning(
                "step %d has diverged: %s. It is saved, and never resumed from; rollback(state) goes back to the last "
                "healthy checkpoint",
                job.step,
                reason,
            )


def _has_own_form(value: Any) -> bool:
    return hasattr(value, "state_dict") and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer))


def _warn_of_idle_patterns(layout: Layout, declared: Declarations) -> None:
    paths = [path_of(name, entry.component) for name, entry in layout.tensors.items()]
    for pattern in declared.frozen:
        if not any(map(Declarations(frozen=(pattern,)).is_frozen, paths)):
            log.warning(
                "frozen=[%r] matches no tensor of the state, whose names are like %s",
                pattern,
                ", ".join(map(repr, paths[:3])) or "nothing: it has no tensors",
            )


def _warn_of_difference(found: tuple[str, int, int] | None) -> None:
    if found is not None:
        log.error(
            "ranks %d and %d hold other values of %r, and only one of them is saved. Pipeline stages whose layers have "
            'the same names: declare them with per_rank=["model", "optimizer"]; else begin all ranks with one state',
            *found[1:],
            found[0],
        )


def _components(plan: LocalPlan, state: Mapping[str, Any]) -> dict[str, Component]:
    """What the service lists of each component: its kind, and its bytes on this rank."""
    return {key: _component(key, value, plan.component_bytes[key]) for key, value in state.items()}


def _component(key: str, value: Any, logical_bytes: int) -> Component:
    if isinstance(value, torch.nn.Module):
        return Component(kind="model", logical_bytes=logical_bytes)
    if isinstance(value, torch.optim.Optimizer):
        return Component(kind="optimizer", logical_bytes=logical_bytes)
    if isinstance(value, LRScheduler):
        return Component(kind="lr_scheduler", logical_bytes=logical_bytes)
    return Component(kind="dataloader" if "loader" in key else "extra", logical_bytes=logical_bytes)
