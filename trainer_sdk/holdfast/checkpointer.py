"""The one object of a training script. It holds the parts together; each part's file says what it does.

restore()  -> session (attempt) -> restore -> documents, source -> state.load
step()     -> agreement, when/schedule (due?) -> save()
save()     -> saving (capture, plan, vote, stage) -> pipeline (hash, upload, seal) -> commit_watch
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from holdfast.dcp.own_saves import OwnSaves
from holdfast.distributed.agreement import Ask
from holdfast.distributed.ranks import Ranks
from holdfast.errors import HoldfastError, Preempted
from holdfast.health.components import Completeness
from holdfast.health.rollback import Rollback
from holdfast.health.rule import HealthJudge, HealthRule
from holdfast.layout.plan import ChunkSizes
from holdfast.local.adoption import Adoption
from holdfast.local.keep import open_local_tier
from holdfast.preemption.cover import cover_of
from holdfast.preemption.emergency import EmergencySave
from holdfast.preemption.watch import PreemptionWatch
from holdfast.progress import Progress, ProgressBoard, speak_up
from holdfast.restore.checkpoint_reader import HostSharing
from holdfast.restore.loading import Loading
from holdfast.restore.restorer import Restorer
from holdfast.save.job import SaveHandle, SaveStats
from holdfast.save.pipeline import SavePipeline
from holdfast.save.saver import Metrics, Saver, window_bytes
from holdfast.schedule.save_policy import Policy, policy_of
from holdfast.schedule.schedule import Due, Schedule, known_best
from holdfast.session.heartbeat import OutcomeFile
from holdfast.session.session import Session
from holdfast.settings import TrainerSettings
from holdfast.state.components import Declarations
from holdfast.verify.following import follow
from holdfast_client.chunks.workers import TransferWorkers
from holdfast_client.client import Client
from holdfast_client.settings import ClientSettings
from holdfast_protocol.states import AttemptOutcome, CheckpointKind

if TYPE_CHECKING:
    from holdfast.verify.recorder import Recorder

log = logging.getLogger("holdfast")

_DRAIN_AFTER_ERROR_SECONDS = 30.0


class Checkpointer(Loading, OwnSaves):
    """Saves and restores one run. Make it on every rank, after torch.distributed is initialised (if it is used).

    run: `project/run`; without it HOLDFAST_RUN. URL and token come from the environment (holdfast_client.settings).
    save: when step() saves: Every(steps=500), Every(minutes=10), Auto(), Best("val_loss"), OnPreemption(), or several
        joined by `|`. Without it Auto(), as often as loses the least. A save that is due while an earlier one is in
        flight is done at the first step after that one.
    strict: a save that fails raises SaveFailed at the next call. Without it, it is logged and counted in `stats`, and
        training goes on. A stale attempt and a refused token raise either way.
    replicated, per_rank: keys of the state whose values are the same on all ranks, or each rank's own, where the
        default (models, optimizers and schedulers are shared, all else is each rank's own) does not fit.
    create: make project and run (True), refuse to (False), or make the run unless its name looks mistyped (None).
    frozen: shell patterns over tensor names (`["model/base.*"]`): your word that these tensors do not change while this
        job runs. They are staged and hashed at the first save only. A change that is seen is an error in the log, and
        the tensor is staged at every save from then on; one that is not seen (a write through `.data`) may put its
        older bytes into checkpoints until its turn to be compared comes. restore() is no such change.
    stage_every: stage the state after every so many steps, in place of what was staged before, and send nothing. If the
        job is told to leave and no step ends in time, that is what is saved. Costs as much host memory again as a save.
    host_memory: the most bytes of host memory that this rank stages into (HOLDFAST_HOST_MEMORY_BYTES). A larger state
        goes through it as through a window: save() then returns only when the last byte is staged, which is nearly as
        long as the upload takes, and `frozen` saves nothing. By default a save takes as much memory as the state.
    local: a folder on this node's own disk (HOLDFAST_LOCAL_DIR). A save is durable there first and goes up behind, in
        order, while the next ones are staged. While service or store are away, saves collect there; this job commits
        them as soon as both are back, or the next launch with this folder before it restores.
    compress: `"zstd"` compresses chunks before they are sent, without loss, where that saves 5% or more
        (HOLDFAST_COMPRESS). It takes CPU time: worth it where the store is far or dear (docs/performance.md).
    check_finite: look for NaN and infinity in models and optimizers at each save (state/finite.py says what counts):
        True everywhere, None only in what is on GPUs. Such a checkpoint is kept as diverged, and not resumed from.
    healthy: your own rule on what is diverged, asked on rank 0 at each save: `(step, metrics) -> True`, or False, or a
        text that says why (health/rule.py), or `LossSpike()`. Without it: a metric that is called loss is not finite.
    drop: components that the run's first checkpoint has and this job leaves out on purpose. What is missing without
        that is said loudly, and with `strict` refused (MissingComponent).
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        save: Policy | None = None,
        strict: bool = False,
        replicated: Iterable[str] = (),
        per_rank: Iterable[str] = (),
        frozen: Iterable[str] = (),
        create: bool | None = None,
        check_finite: bool | None = None,
        healthy: HealthRule | None = None,
        drop: Iterable[str] = (),
        stage_every: int | None = None,
        host_memory: int | None = None,
        local: str | Path | None = None,
        compress: Literal["none", "zstd"] | None = None,
        chunk_sizes: ChunkSizes | None = None,
        settings: TrainerSettings | None = None,
        client_settings: ClientSettings | None = None,
    ) -> None:
        speak_up()
        policy = policy_of(save)
        self._settings = settings or TrainerSettings()
        run_name = self._settings.run_name(run)
        declared = Declarations.of(replicated=replicated, per_rank=per_rank, frozen=frozen)
        sizes = chunk_sizes or ChunkSizes()
        window = window_bytes(self._settings.host_memory_bytes if host_memory is None else host_memory, sizes)
        self.stats = SaveStats()
        self._progress = ProgressBoard()
        self._strict = strict
        self._check_finite = check_finite
        self._ranks = Ranks(timeout_seconds=self._settings.collective_timeout_seconds)
        self._recorder = follow(self._settings.verify_dir, self._ranks, declared)
        if self._recorder is not None:  # nothing of the user's own catalog or node is touched
            run_name, create, local, client_settings = self._recorder.run(run_name), True, None, None
        self._client = Client((client_settings or ClientSettings()).compressing(compress))
        self._tier = open_local_tier(self._ranks, self._client.settings, local)
        self._workers = TransferWorkers(self._settings.transfers)
        adoption = Adoption(self._client, run_name, self._ranks, self._workers, self._tier, self.stats)
        outcome_file = OutcomeFile(run_name, self._ranks.rank, self._settings)
        self._session = Session(
            self._client, run_name, self._ranks, create=create, outcome_file=outcome_file, adoption=adoption
        )
        self._pipeline = SavePipeline(
            self._session,
            self.stats,
            self._workers,
            retry_seconds=self._settings.save_retry_seconds,
            progress=self._progress,
            tier=self._tier,
        )
        self._judge = HealthJudge(healthy, asked=self._ranks.is_first)
        self._saver = Saver(
            self._session,
            self._pipeline,
            self.stats,
            declared=declared,
            sizes=sizes,
            check_finite=check_finite,
            judge=self._judge,
            completeness=Completeness(drop=drop, strict=strict, speaks=self._ranks.is_first),
            window_bytes=window,
            helpers=self._workers.hashing,
        )
        self._restorer = Restorer(
            self._session,
            self._workers,
            declared=declared,
            sharing=HostSharing(self._ranks, self._settings, local=self._tier.folder if self._tier else None),
            progress=self._progress,
        )
        self._rollback = Rollback(self._session, self._pipeline, self._restorer)
        self._schedule = Schedule(
            policy,
            self._ranks,
            busy=lambda: self._pipeline.busy,
            recommended_seconds=lambda: self._session.save_interval_seconds,
            known_best=lambda best: known_best(self._session.brief_client, self._session.run, best),
        )
        self._raised: HoldfastError | None = None
        self._end_lock = threading.Lock()
        self._has_ended = False
        self._preempted: Preempted | None = None
        self._cover = cover_of(
            stage_every, self._ranks, self._saver, self._pipeline, window=window, helpers=self._workers.hashing
        )
        self._preemption = PreemptionWatch(
            self._ranks,
            self._settings,
            wants=self._schedule.wants,
            has_work=lambda: self._session.has_opened,
            end=self._end,
        )
        self._agreement = self._preemption.agreement
        self._preemption.cover = self._cover
        self._emergency = EmergencySave(
            self._ranks, self._saver, self._pipeline, self._preemption, stats=self.stats, progress=self._progress
        )
        self._closed = False
        self._process_id = os.getpid()
        # For scripts without a `with`: the save in flight at the end of the program is finished all the same.
        atexit.register(self._close_at_exit)

    @property
    def run(self) -> str:
        return str(self._session.run)

    @property
    def progress(self) -> Progress | None:
        """How far this process's restore is, or the upload of its save in flight; None while there is neither. To be
        asked from any thread, as often as one likes."""
        return self._progress.read()

    def step(self, step: int, state: dict[str, Any], metrics: Metrics | None = None) -> SaveHandle | None:
        """Call it after each step, on every rank. Saves when it is due; else costs about a microsecond.

        Where an earlier save is still in flight on any rank, all ranks put this one off, to the first step after that
        one. A save for Best waits for it: a later step is not the one that was measured.
        """
        self._session.account.ran(step)
        if not self._session.may_save:
            self._session.ready_to_save()
        self._judge.observe(step, metrics)
        if self._recorder is not None:
            return self._step_recorded(self._recorder, step, state, metrics)
        ask = self._agreement.due(step)
        if ask is Ask.PREEMPT:
            raise self._emergency_save(step, state, metrics)
        due = self._schedule.due(step, metrics, agreed=ask is Ask.SAVE)
        handle = None if due is None else self._save(step, state, metrics, CheckpointKind.PERIODIC, due=due)
        if due is None and self._cover is not None and self._cover.is_due(step):
            self._cover.stage(step, state, metrics)
        self._raise_pending()
        return handle

    def save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Metrics | None = None,
        kind: CheckpointKind | str = CheckpointKind.PERIODIC,
    ) -> SaveHandle:
        """Saves now; call it on every rank. Waits for an earlier save (with a local tier until that one is on the
        node's disk), then blocks for staging only; with `host_memory`
        and a larger state, that is until the last byte is staged, while the first ones go up.

        Raises on every rank where one rank's state cannot be saved (UnsupportedStateError names the key).
        """
        self._session.account.reached(step)
        handle = self._save(step, state, metrics, CheckpointKind(kind))
        self._raise_pending()
        if self._recorder is not None:
            self._recorder.stepped(step, state, metrics, handle)
        return handle

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until no save is in flight, with a local tier none in the spool. False if it takes longer. Not a
        collective."""
        over = self._wait_idle(timeout_seconds)
        self._raise_pending()
        return over

    def _wait_idle(self, timeout_seconds: float | None) -> bool:
        began = time.monotonic()
        own_are_over = self._own_saves_are_over(timeout_seconds)
        left = None if timeout_seconds is None else max(0.0, timeout_seconds - (time.monotonic() - began))
        return self._pipeline.wait_idle(left) and own_are_over

    def close(self, outcome: AttemptOutcome = AttemptOutcome.FINISHED, detail: str = "") -> None:
        """Waits for the save in flight, within bounds, and ends the attempt. Twice is fine. Not a collective."""
        # A forked child has none of the threads, and its end is not the job's.
        if self._closed or os.getpid() != self._process_id:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        began = time.monotonic()
        in_order = outcome is not AttemptOutcome.FAILED
        if in_order:
            self._preemption.closing()
        if outcome is AttemptOutcome.FINISHED:
            # A notice that comes now shortens it.
            drained = self._preemption.while_time_is_left(self._wait_idle)
            if not drained and (notice := self._preemption.notice) is not None:
                outcome, detail = AttemptOutcome.PREEMPTED, f"{notice}. The last save was not committed in time."
        elif not in_order:
            bound = min(self._preemption.wait_seconds(), _DRAIN_AFTER_ERROR_SECONDS)
            self._wait_idle(bound)
        self._pipeline.close(drain_seconds=0, waited_seconds=time.monotonic() - began)
        self._end(outcome, detail)
        self._preemption.close(in_order=in_order)
        self._schedule.close()
        self._workers.close()
        self._saver.close()
        if self._cover is not None:
            self._cover.close()
        if self._tier is not None:
            self._tier.close()
        self._client.close()
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # sys.exit(0) ends a script that is done.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            if self._session.ended_by() is not self._raised:
                self._raise_pending()
        elif isinstance(error, Preempted):
            self.close(AttemptOutcome.PREEMPTED, error.detail)
        else:
            self._crashed(error)

    def _close_at_exit(self) -> None:
        # Set where the program ends by an exception; in an interactive session by any earlier one.
        error = getattr(sys, "last_value", None)
        if error is None or hasattr(sys, "ps1"):
            self.close()
        elif isinstance(error, Preempted):
            self.close(AttemptOutcome.PREEMPTED, error.detail)
        else:
            self._crashed(error)

    def _end(self, outcome: AttemptOutcome, detail: str) -> None:
        """Once, whoever comes first: this thread, or the one that ends the process at the deadline."""
        with self._end_lock:
            if not self._has_ended:
                self._has_ended = True
                self._session.end(outcome, detail, self._preemption.told)

    def _emergency_save(self, step: int, state: dict[str, Any], metrics: Metrics | None) -> Preempted:
        if self._preempted is None:
            self._preempted = self._emergency.save(step, state, metrics)
        return self._preempted

    def _crashed(self, error: BaseException) -> None:
        # Told before anything is waited for: soon the launcher ends the other ranks, and their words come later.
        if not self._closed and os.getpid() == self._process_id:
            self._session.crashed(error)
        self.close(AttemptOutcome.FAILED, f"{type(error).__name__}: {error}")

    def _save(
        self,
        step: int,
        state: dict[str, Any],
        metrics: Metrics | None,
        kind: CheckpointKind,
        *,
        due: Due | None = None,
    ) -> SaveHandle:
        """`due`: why step() saves; None where the script asks for it."""
        try:
            handle = self._saver.save(step, state, metrics, kind, wait=due is not Due.BY_INTERVAL)
            self._schedule.saved(metrics, handle, due)
            return handle
        finally:
            self._schedule.restart()
            self._agreement.restart()

    def _step_recorded(
        self, recorder: Recorder, step: int, state: dict[str, Any], metrics: Metrics | None
    ) -> SaveHandle | None:
        due = recorder.saves_at(step)
        handle = self._save(step, state, metrics, CheckpointKind.PERIODIC) if due else None
        self._raise_pending()
        recorder.stepped(step, state, metrics, handle)
        return handle

    def _raise_pending(self) -> None:
        if (ended_by := self._session.ended_by()) is not None:
            self._raised = ended_by
            raise ended_by
        failed = self.stats.last_failure
        if self._strict and failed is not None and failed is not self._raised:
            self._raised = failed
            raise failed
