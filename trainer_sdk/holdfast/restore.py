"""The way back: choose the point -> read documents -> plan -> fetch and verify -> all ranks agree -> apply -> RNG.

The training state is touched only after every byte of every rank was verified and all ranks said so. Until then the
bytes lie in host memory, as much as one save stages. So a checkpoint that turns out to be damaged costs nothing but
time: the ranks take the one before it, together.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from holdfast.documents import CheckpointDocuments, read_documents
from holdfast.errors import (
    CheckpointNotFound,
    ChunkGone,
    ConfigurationError,
    IntegrityError,
    NoRestorePoint,
)
from holdfast.layout.reshard import plan_reads
from holdfast.pipeline import readable_bytes
from holdfast.session import Session
from holdfast.source import CheckpointSource, new_buffers
from holdfast.state.components import Declarations
from holdfast.state.load import LoadPlan, plan_load
from holdfast.state.rng import derive_rng, restore_rng
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.errors import ChunkNotFound
from holdfast_protocol.restore import PassedOver, RestoreDecision, RestorePoint
from holdfast_protocol.selectors import SelectorError, parse_point

log = logging.getLogger("holdfast")

DAMAGED = (IntegrityError, ChunkGone, ChunkNotFound, CheckpointNotFound)
"""The checkpoint is at fault: an earlier one may do. Anything else that goes wrong would go wrong with that one too."""


@dataclass(frozen=True)
class _Staged:
    plan: LoadPlan
    buffers: dict[str, memoryview]
    fetched_bytes: int


class Restorer:
    def __init__(self, session: Session, workers: TransferWorkers, *, declared: Declarations) -> None:
        self._session = session
        self._ranks = session.ranks
        self._workers = workers
        self._declared = declared

    def restore(self, state: dict[str, Any], at: str | None) -> int:
        """Collective. The next step to run: 0 only where the service says that nothing was ever committed.

        `at` names one point, which is restored or raises; without it the newest that all ranks can read is taken.
        """
        if at is not None and self._session.may_save:
            raise ConfigurationError(
                f"restore(at={at!r}) comes too late: this job has begun already. Launch it again to go back."
            )
        decision = self._decide(at)
        while decision.restore_point is not None:
            point = decision.restore_point
            try:
                return self._restore_point(state, point, decision.passed_over, rollback=at is not None)
            except DAMAGED as error:
                if at is not None:
                    raise
                # All ranks hold the same error, so all of them come here.
                decision = self._before(point)
                self._say_fallback(point, decision, error)
        if decision.ever_committed or at is not None:
            raise self._nothing_left(decision, at)
        if self._ranks.is_first:
            log.info("%s begins: nothing was ever committed in it", self._session.run)
        self._session.restored_from(None, rollback=False)
        return 0

    def choose(self, at: str | None) -> RestorePoint:
        """The point that a restore would begin with. Collective. Raises NoRestorePoint where there is none."""
        decision = self._decide(at)
        if decision.restore_point is None:
            raise self._nothing_left(decision, at)
        return decision.restore_point

    def _decide(self, at: str | None) -> RestoreDecision:
        again = self._session.has_opened
        opened = self._session.open()
        if at is None and not again:
            return RestoreDecision(
                restore_point=opened.restore_point,
                passed_over=opened.passed_over,
                ever_committed=opened.ever_committed,
            )
        try:
            selector = str(parse_point(at or "latest"))
        except SelectorError as error:
            raise ConfigurationError(f"restore(at={at!r}) is not usable: {error}.") from None
        run = self._session.run
        return self._ranks.from_first(lambda: self._session.client.restore_point(run.project, run.run, selector))

    def _before(self, point: RestorePoint) -> RestoreDecision:
        run = self._session.run
        return self._ranks.from_first(
            lambda: self._session.client.restore_point(run.project, run.run, before_step=point.step)
        )

    def _restore_point(
        self, state: dict[str, Any], point: RestorePoint, passed_over: list[PassedOver], *, rollback: bool
    ) -> int:
        began = time.monotonic()
        with CheckpointSource(self._session.client, point.checkpoint_id, workers=self._workers) as source:
            documents = read_documents(self._ranks, source, rank_trees=True)
            staged: list[_Staged] = []
            self._ranks.together(lambda: staged.append(self._stage(state, source, documents)))
        fetched = self._ranks.gather(staged[0].fetched_bytes)
        self._ranks.together(lambda: self._apply(staged[0], documents, point.step))
        self._ranks.from_first(lambda: self._session.restored_from(point.checkpoint_id, rollback=rollback))
        self._session.may_save = True
        if self._ranks.is_first:
            log.info(
                "resumed %s from step %d%s: %s read and verified in %.1f s%s",
                self._session.run,
                point.step,
                self._other_world(documents),
                readable_bytes(sum(fetched)),
                time.monotonic() - began,
                _newer(passed_over),
            )
        return point.step + 1

    def _stage(self, state: dict[str, Any], source: CheckpointSource, documents: CheckpointDocuments) -> _Staged:
        """All that this rank wants, verified, in host memory; nothing of the state is changed."""
        plan = plan_load(
            state,
            documents.stored,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            declared=self._declared,
        )
        reads = plan_reads(documents.layout, plan.wanted, prefer_rank=self._ranks.rank)
        buffers = new_buffers(plan.wanted)
        return _Staged(plan, buffers, source.read(reads, documents.chunks, buffers))

    def _apply(self, staged: _Staged, documents: CheckpointDocuments, step: int) -> None:
        staged.plan.apply(staged.buffers)
        # Last: loading draws numbers too.
        if documents.layout.world_size != self._ranks.world_size:
            derive_rng(str(self._session.run), step, self._ranks.rank)
        elif documents.rng is not None:
            restore_rng(documents.rng)

    def _other_world(self, documents: CheckpointDocuments) -> str:
        if documents.layout.world_size == self._ranks.world_size:
            return ""
        return (
            f" (saved by {documents.layout.world_size} ranks, now {self._ranks.world_size}: resharded, and random "
            "numbers derived anew from run, step and rank)"
        )

    def _say_fallback(self, point: RestorePoint, decision: RestoreDecision, error: Exception) -> None:
        if self._ranks.is_first:
            following = decision.restore_point
            then = f"taking step {following.step} instead" if following else "and there is no earlier one"
            log.warning("step %d of %s cannot be restored, %s: %s", point.step, self._session.run, then, error)

    def _nothing_left(self, decision: RestoreDecision, at: str | None) -> NoRestorePoint:
        what = f"{self._session.run} has no restore point" + (f" {at!r}" if at else "")
        reasons = " ".join(passed.detail for passed in decision.passed_over[:3])
        return NoRestorePoint(
            f"{what}, so nothing was loaded. {reasons} `holdfast checkpoints {self._session.run}` lists what there is; "
            "to begin from nothing, choose the name of a new run"
        )


def _newer(passed_over: list[PassedOver]) -> str:
    if not passed_over:
        return ""
    shown = ", ".join(f"{passed.step} ({passed.reason})" for passed in passed_over[:3])
    return f"; newer steps passed over: {shown}" + (" and more" if len(passed_over) > 3 else "")
